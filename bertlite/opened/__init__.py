"""A checkpoint that is opened once: its files are found, and each is read once.

checkpoint   `Checkpoint`: config, tokenizer, sentence-transformers' modules, card, class of the model, and the model
inspection   its contents, and which libraries load it
"""
