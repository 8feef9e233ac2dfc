"""BERT's tokenizer."""
