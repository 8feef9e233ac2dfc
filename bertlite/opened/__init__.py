"""A checkpoint that is opened once: its files are found, and each is read once.

checkpoint   `Checkpoint`: config, tokenizer, sentence-transformers' modules, the class of the model, and the model
card         the reading of its model card
inspection   its contents, and which libraries load it
"""
