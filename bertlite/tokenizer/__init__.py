"""BERT's tokenizer: `tokenizer` has the class, `encoding` makes batches, `files` reads and writes folders."""

from bertlite.tokenizer.encoding import BatchEncoding
from bertlite.tokenizer.tokenizer import BertTokenizer

__all__ = ["BatchEncoding", "BertTokenizer"]
