"""The models: `base` has BertModel and what all share, `heads` the task heads, `resizing` other numbers of tokens."""
