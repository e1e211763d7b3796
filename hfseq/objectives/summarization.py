"""Summaries of texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfseq.data.arguments import SummarizationArguments
from hfseq.errors import UsageError
from hfseq.objectives.metrics import Scores, rouge_scores
from hfseq.objectives.translation import Translation

if TYPE_CHECKING:
    from hfseq.modeling import FlaxPreTrainedModel


class Summarization(Translation):
    """Cross-entropy of summaries given texts, as of translations; judged by ROUGE.

    Texts that are longer than a row are cut; several short ones share a row, and see nothing of
    each other.
    """

    name = "summarization"
    data_arguments = SummarizationArguments
    default_model_type = None
    pipeline_tag = "summarization"

    arguments: SummarizationArguments

    def setup(self) -> None:
        """Refuse to summarise nothing; translation has data of its own to show itself with."""
        data = self.arguments
        if not (data.dataset_name or data.train_file or data.validation_file or data.test_file):
            raise UsageError("no data: give --train_file or --dataset_name")
        super().setup()

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Let what is written be as long as what is learned from, where no flag says how long."""
        lengths = self.arguments.lengths(model.max_length())
        self.arguments.max_new_tokens = self.arguments.max_new_tokens or lengths[1] - 1
        super().prepare(model)

    def judge(self, hypotheses: list[str], references: list[str]) -> Scores:
        """Return ROUGE, and how many tokens a summary has."""
        scores = rouge_scores(hypotheses, [[one] for one in references])
        lengths = [len(ids) for ids in self.tokenizer(hypotheses)["input_ids"]]
        scores["gen_len"] = sum(lengths) / max(len(lengths), 1)
        return Scores(scores, {"rouge": "rouge-score, stemmed, F1"})
