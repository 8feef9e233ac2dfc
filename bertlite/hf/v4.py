"""BERT with the signatures and results of transformers 4.57, on any transformers: for code that uses its parts.

Import them from here::

    from bertlite.hf.v4 import BertLayer, BertModel, BertPreTrainedModel

`bertlite.hf` follows the installed transformers, whose layers return a tuple in 4 and a tensor in 5.  Code for
transformers 4 that reads `layer(…)[0]` would silently get the first example of a batch in 5.  Here the parts have
4.57's signatures and tuples under both, and the fifth positional argument of BertModel is `head_mask`.  Under
transformers 4.57 both are the same classes.
"""

# mypy: disable-error-code=no-redef
from bertlite.hf import *  # noqa: F403  # everything that is not redefined below
from bertlite.hf import compat, modeling
from bertlite.hf.layers4 import BertAttention, BertEncoder, BertLayer, BertSelfAttention  # noqa: F401
from bertlite.hf.signatures import ORDER_OF_4, in_order
from bertlite.models.body import HeadBody

if not compat.RETURNS_TUPLES:

    @in_order(ORDER_OF_4)
    class BertModel(modeling.BertModel):
        """BertModel with layers of transformers 4."""

        encoder_class = BertEncoder
        cache_name = "past_key_values"

    globals().update(
        (name, type(name, (head,), {"base_class": BertModel, "__module__": __name__}))
        for name, head in vars(modeling).items()
        if isinstance(head, type) and issubclass(head, HeadBody) and head is not HeadBody
    )
