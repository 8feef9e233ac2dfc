"""The forward paths that are rehearsed: model x backend x inputs x dtype x the way it is run.

Shapes:  B 3 sequences · S 11 positions · D 64 hidden · L 3 layers · N 4 heads · H 16 head dim
"""

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

import bertlite
from bertlite.lab.rehearsal.backward import backward
from bertlite.lab.rehearsal.device import PretendedDevice

CORE, HF = "bertlite", "bertlite.hf"
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "max_position_embeddings": 40,
    "type_vocab_size": 5,
}
B, S, L, N = 3, 11, 3, 4
LENGTHS = (11, 7, 4)
PRUNED_HEADS, PRUNED_NEURONS = {0: [1, 3], 2: [0, 1, 2, 3]}, {1: [0, 5, 36]}
DECODER = {"is_decoder": True}
HEADS = (
    "BertForPreTraining",
    "BertForMaskedLM",
    "BertForNextSentencePrediction",
    "BertForSequenceClassification",
    "BertForMultipleChoice",
    "BertForTokenClassification",
    "BertForQuestionAnswering",
)
NOT_REHEARSED = {
    "torch.compile and CUDA graphs": "inductor and graphs need a GPU; what is compiled is rehearsed uncompiled",
    "the fused kernels of SDPA": "flash, efficient and cuDNN are chosen by asking the GPU; the math kernel stands in",
    "the inside of varlen_attn": "the kernel needs a GPU; a stand-in on the CPU computes the same",
    "TF32": "it changes how a GPU rounds, and nothing that a rehearsal sees",
    "pinned memory": "checkpoints are offloaded to ordinary memory here",
    "attention functions of transformers": "flash_attention_2 and others are libraries of their own",
}

Given = dict[str, Any]


def lengths_mask() -> Tensor:
    """Return (B, S), 1 for the tokens and 0 for the padding on the right."""
    return (torch.arange(S) < torch.tensor(LENGTHS)[:, None]).long()


def mask_of_queries() -> Tensor:
    """Return (B, S, S), what each query may look at."""
    return torch.ones(S, S, dtype=torch.long).tril()[None] * lengths_mask()[:, None]


def scores() -> Tensor:
    """Return (B, 1, S, S), floats to add to the scores."""
    drawn = torch.randn(B, 1, S, S)
    return drawn.masked_fill(mask_of_queries()[:, None] == 0, torch.finfo(drawn.dtype).min)


def with_empty_row() -> Tensor:
    mask = lengths_mask()
    mask[1] = 0
    return mask


MASKS: dict[str, Callable[[], Tensor]] = {
    "2-D mask": lengths_mask,
    "bool mask": lambda: lengths_mask().bool(),
    "mask with an empty row": with_empty_row,
    "3-D mask": mask_of_queries,
    "4-D bool mask": lambda: mask_of_queries()[:, None].bool(),
    "4-D float mask": scores,
}
GATES: dict[str, Callable[[], Tensor]] = {
    "head_mask (N,)": lambda: torch.rand(N),
    "head_mask (L, N)": lambda: torch.rand(L, N),
    "head_mask (L, B, N)": lambda: torch.rand(L, B, N),
    "head_mask (L, B, N, 1, 1)": lambda: torch.rand(L, B, N, 1, 1),
}


def ends() -> Tensor:
    return torch.tensor([0, *LENGTHS]).cumsum(0).int()


@dataclass(frozen=True)
class Path:
    """One way through a model.

    Args:
        waits: how often it may make the host wait for the GPU.
        mode: a key of MODES.
    """

    room: str
    what: str
    model: str = "BertModel"
    backend: str = "sdpa"
    dtype: str = "float32"
    mask: str = ""
    gate: str = ""
    waits: int = 0
    mode: str = "forward"
    pruned: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        parts = [self.room, self.model, self.backend, self.dtype, self.mode, self.what]
        return " · ".join(part for part in parts if part)

    def run(self, device: PretendedDevice) -> Any:
        """Make the model and its inputs, and run it on the pretended GPU."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            with _disable_current_modes():
                model, given = self.make(), self.inputs()
            placed = {name: device.place(x) if isinstance(x, Tensor) else x for name, x in given.items()}
            if placed.pop("cu_seqlens_on", "") == "cpu":
                placed["cu_seqlens"] = device.beside(given["cu_seqlens"])
            return MODES[self.mode](self, device, device.place_model(model), placed)

    def make(self) -> Any:
        """Make the model on the CPU."""
        if self.room == CORE:
            config: Any = bertlite.BertConfig(**SIZES, **self.changes, attn_implementation=self.backend)
            model = getattr(bertlite, self.model)(config)
        else:
            import transformers

            from bertlite import hf

            config = transformers.BertConfig(**SIZES, **self.changes, attn_implementation=self.backend)
            model = getattr(hf, self.model)(config)
        if self.pruned:
            bertlite.prune_heads_(model, PRUNED_HEADS)
            bertlite.prune_neurons_(model, PRUNED_NEURONS)
        return model.to(getattr(torch, self.dtype)).eval().requires_grad_(self.mode in RECORDED)

    def inputs(self) -> Given:
        """Return the keyword arguments of the forward, on the CPU."""
        ids, types = torch.randint(1, SIZES["vocab_size"], (B, S)), torch.randint(0, 5, (B, S))
        given: Given = {"input_ids": ids, "token_type_ids": types, **labels_of(self.model, ids)}
        if self.mask:
            given["attention_mask"] = MASKS[self.mask]()
        if self.gate:
            given["head_mask"] = GATES[self.gate]()
        for name, make in self.options.items():
            given[name] = make() if callable(make) else make
        if "inputs_embeds" in given:
            del given["input_ids"]
        if self.model == "BertForMultipleChoice":
            given = {
                name: x[:, None].expand(-1, 2, *x.shape[1:]) if name != "labels" else x for name, x in given.items()
            }
        return without_padding(given) if "cu_seqlens_on" in given else given

    def reason_missing(self) -> str:
        """Return the reason why it cannot be rehearsed here; empty if it can."""
        if self.room == HF and importlib.util.find_spec("transformers") is None:
            return "transformers is not installed"
        if self.mode in RECORDED and not torch.backends.cuda.is_built():
            return f"this torch ({torch.__version__}) is built without CUDA, and gradients of CUDA tensors end it"
        return ""


def without_padding(given: Given) -> Given:
    """Return inputs in rows as packed ones."""
    real = lengths_mask().bool()
    rows = {name: x[real] if isinstance(x, Tensor) and x.shape[:2] == (B, S) else x for name, x in given.items()}
    return {**rows, "cu_seqlens": ends()}


def labels_of(model: str, ids: Tensor) -> Given:
    """Return the labels that a model takes."""
    classes = torch.arange(B) % 2
    words = ids.where(ids % 3 == 0, -100)
    return {
        "BertForPreTraining": {"labels": words, "next_sentence_label": classes},
        "BertForMaskedLM": {"labels": words},
        "BertForNextSentencePrediction": {"labels": classes},
        "BertForSequenceClassification": {"labels": classes},
        "BertForMultipleChoice": {"labels": classes},
        "BertForTokenClassification": {"labels": ids % 2},
        "BertForQuestionAnswering": {"start_positions": classes, "end_positions": classes + 2},
    }.get(model, {})


def forward(path: Path, device: PretendedDevice, model: Any, given: Given) -> Any:
    with torch.no_grad():
        return model(**given)


def in_autocast(path: Path, device: PretendedDevice, model: Any, given: Given) -> Any:
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        return model(**given)


def training(path: Path, device: PretendedDevice, model: Any, given: Given) -> Any:
    with torch.no_grad():  # dropout is on
        return model.train()(**given)


def with_gradients(path: Path, device: PretendedDevice, model: Any, given: Given) -> Any:
    """Run forward and backward, and return the gradients too."""
    out = model.train()(**given)
    backward(out.loss if "loss" in out and out.loss is not None else out[0].float().square().mean())
    return out, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def checkpointed(path: Path, device: PretendedDevice, model: Any, given: Given) -> Any:
    model.gradient_checkpointing_enable()
    return with_gradients(path, device, model, given)


def every_second_checkpointed(path: Path, device: PretendedDevice, model: Any, given: Given) -> Any:
    model.gradient_checkpointing_enable(every_n_layers=2)
    return with_gradients(path, device, model, given)


def offloaded(path: Path, device: PretendedDevice, model: Any, given: Given) -> Any:
    model.gradient_checkpointing_enable(offload=True)
    return with_gradients(path, device, model, given)


def decoding(path: Path, device: PretendedDevice, model: Any, given: Given) -> Any:
    """Run a decoder on the first 5 tokens, and then twice on one more, with the keys and values of those before."""
    whole, out, start, outs = dict(given), None, 0, []
    ids, types, mask = whole.pop("input_ids"), whole.pop("token_type_ids"), whole.pop("attention_mask", None)
    for end in (5, 6, 7):
        seen = {} if mask is None else {"attention_mask": mask[:, :end]}
        past: Any = None if out is None else out.past_key_values
        with torch.no_grad():
            out = model(
                ids[:, start:end], token_type_ids=types[:, start:end], past_key_values=past, use_cache=True,
                **seen, **whole,
            )  # fmt: skip
        outs.append(out[0])
        start = end
    return outs


def optimised(path: Path, device: PretendedDevice, model: Any, given: Given) -> Any:
    """Run the optimised model, whose parts are left uncompiled."""
    with mock.patch.object(torch, "compile", lambda run, **_: run):
        quick = bertlite.optimize_for_inference(model, verify=False)  # whose reading of values is none of a forward
    assert (quick.backend, quick.device.type) == ("inductor", "cuda")
    return quick(**given)


Run = Callable[[Path, PretendedDevice, Any, Given], Any]
RECORDED: dict[str, Run] = {  # with gradients
    "gradients": with_gradients,
    "checkpointed": checkpointed,
    "every second layer checkpointed": every_second_checkpointed,
    "offloaded": offloaded,
}
MODES: dict[str, Run] = {
    "forward": forward,
    "autocast to bfloat16": in_autocast,
    "training": training,
    "decoding": decoding,
    "optimised": optimised,
    **RECORDED,
}


def paths() -> list[Path]:
    """Return every path, those of bertlite before those of bertlite.hf."""
    core = [*rows(), *tokens_packed(), *decoders(), *task_heads(), *precisions(), *gradients()]
    core += [
        Path(CORE, mask or "no mask", model, backend, dtype, mask, waits=waits, mode="optimised")
        for backend in ("sdpa", "packed")
        for dtype in ("float32", "bfloat16")
        for model, mask, waits in (("BertModel", "2-D mask", 1), ("BertModel", "", 0))
    ]
    core.append(Path(CORE, "2-D mask", HEADS[3], "sdpa", "bfloat16", "2-D mask", waits=1, mode="optimised"))
    core_alone = ("optimised", "every second layer checkpointed", "offloaded")  # transformers has its own
    return core + [replace(path, room=HF) for path in core if path.mode not in core_alone]


def rows() -> Iterator[Path]:
    """Yield encoders whose tokens lie in rows."""
    embeds = {"inputs_embeds": lambda: torch.randn(B, S, SIZES["hidden_size"])}
    returned = {"output_attentions": True, "output_hidden_states": True}
    for backend in ("eager", "sdpa", "auto"):
        yield Path(CORE, "no mask", backend=backend)
        yield Path(CORE, "inputs_embeds", backend=backend, options=embeds)
        yield Path(CORE, "position_ids", backend=backend, options={"position_ids": lambda: torch.arange(S)})
        for mask in MASKS:
            yield Path(CORE, mask, backend=backend, mask=mask, waits=1)
        for gate in GATES:
            yield Path(CORE, gate, backend=backend, gate=gate)
            yield Path(CORE, f"pruned, {gate}", backend=backend, gate=gate, pruned=True)
        yield Path(CORE, "pruned", backend=backend, mask="2-D mask", waits=1, pruned=True)
        yield Path(CORE, "first_token_only", backend=backend, mask="2-D mask", waits=1, options=FIRST)
        yield Path(CORE, "return_encoded", backend=backend, mask="2-D mask", waits=1, options=ENCODED)
        yield Path(CORE, "a tuple", backend=backend, mask="2-D mask", waits=1, options={"return_dict": False})
        yield Path(CORE, "chunked", backend=backend, changes={"chunk_size_feed_forward": 4})
        for kind in ("relative_key", "relative_key_query"):
            changes = {"position_embedding_type": kind}
            yield Path(CORE, kind, backend=backend, mask="2-D mask", waits=1, changes=changes)
        yield Path(CORE, "attentions and states", backend=backend, mask="2-D mask", waits=1, options=returned)


FIRST, ENCODED = {"first_token_only": True}, {"return_encoded": True}


def tokens_packed() -> Iterator[Path]:
    """Yield encoders whose tokens are packed: in float32 in groups, in bfloat16 by varlen_attn."""
    on_gpu, on_cpu = {"cu_seqlens_on": "cuda"}, {"cu_seqlens_on": "cpu"}
    for backend, dtype in (("packed", "float32"), ("packed", "bfloat16"), ("varlen", "bfloat16")):
        plain = Path(CORE, "no mask", backend=backend, dtype=dtype)
        masked = replace(plain, what="2-D mask", mask="2-D mask", waits=1)
        yield from (plain, masked)
        yield replace(masked, what="mask with an empty row", mask="mask with an empty row")
        yield replace(masked, what="first_token_only", options=FIRST)
        yield replace(masked, what="first_token_only, empty row", mask="mask with an empty row", options=FIRST)
        yield replace(masked, what="return_encoded", options=ENCODED)
        yield replace(masked, what="hidden states", options={"output_hidden_states": True})
        yield replace(masked, what="pruned", pruned=True)
        for gate in GATES:
            yield replace(masked, what=gate, gate=gate)
        yield replace(masked, what="pruned, head_mask (L, N)", gate="head_mask (L, N)", pruned=True)
        yield replace(plain, what="cu_seqlens on the GPU", options=on_gpu, waits=1)
        yield replace(plain, what="cu_seqlens on the CPU", options=on_cpu)
        yield replace(plain, what="cu_seqlens on the CPU, first_token_only", options={**on_cpu, **FIRST})
        yield replace(plain, what="cu_seqlens on the CPU, head_mask", gate="head_mask (L, B, N)", options=on_cpu)
    relative = {"position_embedding_type": "relative_key"}
    yield Path(CORE, "relative_key", backend="packed", mask="2-D mask", waits=2, changes=relative)  # is it contiguous?
    yield Path(CORE, "cu_seqlens on the GPU", backend="auto", options=on_gpu, waits=1)


def decoders() -> Iterator[Path]:
    """Yield decoders, with and without a cache and an encoder's output."""
    states: dict[str, Any] = {"encoder_hidden_states": lambda: torch.randn(B, 8, SIZES["hidden_size"])}
    its_mask: dict[str, Any] = {"encoder_attention_mask": lambda: lengths_mask()[:, :8]}
    crossed = {**DECODER, "add_cross_attention": True}
    for backend in ("eager", "sdpa", "auto"):
        plain = Path(CORE, "no mask", "BertLMHeadModel", backend, changes=DECODER)
        yield from (plain, replace(plain, what="2-D mask", mask="2-D mask", waits=1))
        yield replace(plain, what="labels", options={"labels": lambda: torch.ones(B, S, dtype=torch.long)})
        yield replace(plain, what="logits_to_keep", options={"logits_to_keep": 1})
        yield replace(plain, what="to an encoder", changes=crossed, options=states)
        yield replace(plain, what="to an encoder, both masked", changes=crossed, mask="2-D mask", waits=2,
                      options={**states, **its_mask})  # fmt: skip
        cached = replace(plain, mode="decoding")
        yield from (cached, replace(cached, what="2-D mask", mask="2-D mask", waits=3))  # three forwards
        yield replace(cached, what="to an encoder", changes=crossed, options=states)


def task_heads() -> Iterator[Path]:
    """Yield the task heads, with labels."""
    for model in HEADS:
        for backend, dtype in (
            ("eager", "float32"),
            ("sdpa", "float32"),
            ("packed", "float32"),
            ("packed", "bfloat16"),
        ):
            yield Path(CORE, "labels", model, backend, dtype, "2-D mask", waits=1)
    items = {"num_items_in_batch": lambda: torch.tensor(7)}
    yield Path(CORE, "num_items_in_batch", "BertForMaskedLM", mask="2-D mask", waits=1, options=items)
    several = {"problem_type": "multi_label_classification", "num_labels": 2}
    yield Path(CORE, "several labels", HEADS[3], changes=several, options={"labels": lambda: torch.rand(B, 2)})
    number = {"problem_type": "regression", "num_labels": 1}
    yield Path(CORE, "a number", HEADS[3], changes=number, options={"labels": lambda: torch.rand(B)})


def precisions() -> Iterator[Path]:
    """Yield other dtypes, autocast and training mode."""
    for backend in ("eager", "sdpa"):
        for dtype in ("float64", "bfloat16", "float16"):
            for mask in ("2-D mask", "4-D float mask"):
                yield Path(CORE, mask, "BertModel", backend, dtype, mask, waits=1)
    for backend in ("eager", "sdpa", "packed"):
        yield Path(CORE, "2-D mask", backend=backend, mask="2-D mask", waits=1, mode="autocast to bfloat16")
        yield Path(CORE, "2-D mask", backend=backend, mask="2-D mask", waits=1, mode="training")


def gradients() -> Iterator[Path]:
    """Yield training steps: forward and backward."""
    for backend, dtype in (("eager", "float32"), ("sdpa", "float32"), ("packed", "float32"), ("packed", "bfloat16")):
        changes = {"attention_probs_dropout_prob": 0.0} if backend == "packed" else {}
        step = Path(CORE, "2-D mask", "BertForMaskedLM", backend, dtype, "2-D mask", waits=1, changes=changes)
        yield replace(step, mode="gradients")
        yield replace(step, mode="gradients", what="pruned, head_mask (L, N)", gate="head_mask (L, N)", pruned=True)
        yield replace(step, mode="checkpointed")
        yield replace(step, mode="every second layer checkpointed")
        yield replace(step, mode="offloaded", waits=1 + 2 * L)  # each layer's input goes to the host and back
