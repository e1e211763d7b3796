"""Parametrised cases that are slow and whose ground another case of the same test covers.

They are marked ``slow`` here, where the list can be read at a glance: the default suite has to end
within 25 minutes on two cores.
"""

from __future__ import annotations

import re

CASES = tuple(
    re.compile(pattern)
    for pattern in (
        # The page of BERT, and all pages that are not of a family, stay.
        r"test_docs_examples\.py::test_the_examples_of.*\[docs/families/(?!bert\.md)",
        r"plugins/test_bert\.py::test_battery\[For(MultipleChoice|NextSentence|Question|Token|Pre)",
        r"plugins/test_bart\.py::test_battery\[(Model|ForQuestion|ForSequenceClass)",
        r"plugins/test_t5\.py::test_battery(\[Model|_of_v1_1)",
        r"test_vq_bad_input\.py::test_(states_of_another_head|presets_have_the_number)",
        r"test_fp8_training\.py::test_the_state_is.*\[.*(data=8|sequence=2|True1)",
        r"test_classification_loop\.py::test_neither_devices.*\[(data=4|data=2,tensor=2)\]",
        r"test_loop\.py::test_losses_are_those_of_one_device_on_every_mesh\[data=2,fsdp=4\]",
        r"test_loop\.py::test_losses_are_those_of_one_device_on_every_mesh\[data=-1,sequence=4\]",
        # The mesh of three axes stays.
        r"test_objectives\.py::test_neither_devices.*\[data=2-4-(span_mlm|denoising|translation)\]",
        r"test_objectives\.py::test_neither_devices.*\[data=(2,tensor=2|8)-1-(span|deno|transl)",
        r"test_objectives\.py::test_streaming_resumes_at_the_very_row\[denoising\]",
        r"test_update_windows\.py::test_micro_batches_give_the_same_losses.*\[2\]",
        r"test_hostile_checkpoints\.py::test_absurd_conf.*change(0|1|4|6|7|9|10|12|13|14)-",
        r"test_hostile_checkpoints\.py::test_shards_lie_beside.*\[(\.\.|a/b|a\\|3)",
        r"test_hostile_data\.py::test_(a_decompression_bomb|text_that_packs).*\[\.(bz2|xz)\]",
        r"test_hostile_data\.py::test_lines_that_deceive.*\[(table|pairs)-",
        r"test_v4_programs\.py::test_summarization_script\[t5_config\]",
        r"plugins/test_gpt2\.py::test_battery\[Model\]",
        r"test_vq_battery\.py::test_the_battery\[mqa-",
        # Of the encoder-decoders translation stays, of causal models the mesh of three axes.
        r"test_objectives\.py::test_neither_devices.*\[fsdp=2,tensor=2,sequence=2-2-(span|deno)",
        r"test_objectives\.py::test_neither_devices.*\[data=(2-4|2,tensor=2-1|8-1)-clm\]",
        r"test_objectives\.py::test_streaming_resumes_at_the_very_row\[span_mlm\]",
        r"test_objectives\.py::test_evaluation_does_not_depend.*\[(span_mlm|denoising)\]",
        r"test_loop\.py::test_losses_are_those_of_one_device_on_every_mesh\[data=(8|4,tensor=2)\]",
        r"test_loop\.py::test_every_kind_of_optimizer_takes_steps\[(lamb|lion|sgd)\]",
        r"test_classification_loop\.py::test_every_encoder.*\[(bart|vq_transformer|fp8_encoder)\]",
        r"objectives/test_classification\.py::test_encoders_without_token_types.*-vq_transformer\]",
        r"test_fp8_training\.py::test_the_state_is_that_of_one_device\[-(True0|4)\]",
        r"plugins/test_bert\.py::test_battery\[Model\]",
        # T5 and GPT-2 stay.
        r"test_v4_suite\.py::test_generate_equals.*\[(sampling with|greedy with|beams).*-bart\]",
        r"test_run\.py::test_a_suite_runs_tiny.*\[(data|scaling|memory)\]",
        r"test_fp8_benchmark\.py::test_a_tiny_run_on_the_cpu",
        # BERT's heads stay, and of both those that the other leaves out.
        r"plugins/test_roberta\.py::test_battery\[(Model|ForCausalLM|ForSequenceClassification)\]",
        r"test_length_penalty\.py::test_beams_that_hold_everything_find_the_best\[gnmt-0\.0\]",
        r"test_objectives\.py::test_neither_devices.*\[fsdp=2,tensor=2,sequence=2-2-clm\]",
        r"test_objectives\.py::test_a_resumed_run_is_the_uninterrupted.*\[(denoising|span_mlm)\]",
        r"test_plan_against_runs\.py::test_bytes_on_a_device.*-span_mlm-adafactor\]",
        r"test_benchmarks\.py::test_both_sides_step_to_the_same_losses\[bart\]",
        r"test_compaction\.py::test_results_are_those_of_the_plain_loop\[bart-gnmt\]",
        r"plugins/test_t5\.py::test_scanned_decoding_with_a_cache_gives_the_full_forward\[True\]",
        r"test_translator\.py::test_each_translation_is_that_of_generate.*\[greedy\]",
        r"plugins/test_roberta\.py::test_battery_with_cross_attention_and_untied_embeddings",
        r"plugins/test_llama_example\.py::test_battery",
        r"test_docs_examples\.py::test_the_training_loop_of_the_fp8_guide_learns",
        r"test_fp8_training\.py::test_(training_follows_bfloat16|a_run_cannot.*\[bfloat16\])",
    )
)


def is_slow(case: str) -> bool:
    """Tell whether the test with this id is on the list."""
    return any(pattern.search(case) for pattern in CASES)
