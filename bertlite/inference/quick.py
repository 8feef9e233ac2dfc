"""QuickBertModel: a BertModel that runs a usual forward in another way, and every other as its modules."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from bertlite.models.base import BertModel
from bertlite.stack.attention import PACKING
from bertlite.stack.body import output_or_tuple
from bertlite.stack.layouts import Padded
from bertlite.stack.outputs import BertModelOutput, EncoderOutput

INPUTS = {"inputs_embeds", "head_mask", "encoder_hidden_states", "encoder_attention_mask", "past_key_values"}
# a forward with one of these arguments is left to BertBody, unless the argument asks for nothing
RARE = INPUTS | {"use_cache", "output_attentions", "output_hidden_states"}


States = tuple[Tensor, Tensor | None]  # last hidden states, and the pooler's output if there is one
Inputs = tuple[Any, Any, Any, Any]  # ids, mask, segments and positions


class QuickBertModel(BertModel):
    """BertModel whose usual forward is `run_at_once`."""

    is_plain: Callable[..., bool]  # (ids, mask): the quick way computes what the modules would, and no hook sees these
    run_at_once: Callable[..., States | None]  # (the inputs), as `forward` gives them; None: BertBody runs

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        first_token_only: bool = False,
        return_dict: bool | None = None,
        return_encoded: bool = False,
        skip_padding: bool | None = None,
        **others: Any,
    ) -> Any:
        """Run BERT; arguments and results are as for BertBody."""
        given: Inputs = (input_ids, attention_mask, token_type_ids, position_ids)
        found = None
        if not self.asks_for_more(others) and self.is_plain(*given[:2]):
            found = self.run_at_once(given, cu_seqlens, first_token_only, return_encoded, skip_padding)

        # Wrong and rare inputs are for BertBody, whose outputs a head reads in the same way.
        out: Any
        if found is None:
            out = super().forward(
                *given, cu_seqlens=cu_seqlens, first_token_only=first_token_only, return_dict=True,
                return_encoded=return_encoded, skip_padding=skip_padding, **others,
            )  # fmt: skip
        elif return_encoded:
            rows, length = given[0].shape
            layout = Padded(rows, length, length, given[0].device)
            out = EncoderOutput(last_hidden_state=found[0], pooler_output=found[1], layout=layout)
        else:
            out = BertModelOutput(last_hidden_state=found[0], pooler_output=found[1])

        as_dict = return_encoded or (self.config.return_dict if return_dict is None else return_dict)
        return output_or_tuple(out, as_dict)

    def asks_for_more(self, others: dict[str, Any]) -> bool:
        """Return whether other arguments of a forward add inputs or outputs, or are none of a forward's."""
        config = self.config
        outputs = {"output_attentions": config.output_attentions, "output_hidden_states": config.output_hidden_states}
        asked = {**outputs, **{name: x for name, x in others.items() if x is not None}}
        return not others.keys() <= RARE or any(x is not False or name in INPUTS for name, x in asked.items())

    def skips_padding(self, asked: bool | None) -> bool:
        """Return whether padding is left out, by the setting of `optimize_for_inference`, else by the caller's."""
        told = self.encoder.skip_padding
        return (asked if told is None else told) is not False or self.attention_name() in PACKING
