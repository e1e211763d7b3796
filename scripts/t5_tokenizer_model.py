"""The tokenizer class of Transformers 4's T5 example, under the name of its file.

python -c "from t5_tokenizer_model import SentencePieceUnigramTokenizer"   # in this folder
"""

from hfseq import SentencePieceUnigramTokenizer

__all__ = ["SentencePieceUnigramTokenizer"]
