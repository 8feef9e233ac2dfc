"""The models: `base` has BertModel and the base class, `heads` the task heads, `resizing` resizes embeddings."""
