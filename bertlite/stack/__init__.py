"""The BERT stack: masks, attention, layouts, modules and the body that runs them."""
