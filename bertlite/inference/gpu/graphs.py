"""CUDA graphs: the kernels of a forward are recorded once, and then all launched by one call.

A GPU computes a short text faster than Python launches the kernels.  A graph has fixed shapes, so inputs are copied to
a bucket that is at most an eighth larger in tokens.  Padding is left out as by "packed", or computed if something
reads it.

Shapes:  B sequences · S positions · T tokens · D hidden
"""

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bertlite.config import POSITIONS, own_field
from bertlite.inference.gpu.fused import fuse_, knows_positions
from bertlite.inference.gpu.short_attention import SHORT, longest_for, missing_for_short
from bertlite.inference.gpu.triton_kernels import pack_rows, unpack_rows
from bertlite.inference.quick import Inputs, QuickBertModel, States
from bertlite.models.base import BertModel, BertPreTrainedModel
from bertlite.runtime.shapes import power_of_2, round_up, round_up_by_eighths
from bertlite.stack.attention import BACKENDS, PACKING, Backend, LayerContext, Requirements
from bertlite.stack.body import hooks_of
from bertlite.stack.inputs import INDICES, count_positions, values_readable
from bertlite.stack.layouts import Slots

BUCKETS, BYTES = 64, 2 * 2**30  # limits for the graphs of one model
GROWTH = BYTES // 4  # bytes: a pool of memory takes graphs until it has grown by as many since its first one
MOST_TOKENS = 16_000  # with more, launches take less time than the kernels
RECORDING = RLock()  # torch records one graph at a time in a process
WARM_UPS = 2  # forwards before a graph is recorded, which allocate and choose kernels
STREAMS = weakref.WeakSet[Any]()  # the streams of warm-ups and of living pools


class Bucket(NamedTuple):
    """The shapes of a graph; its inputs are as large or smaller.

    Args:
        tokens: T without padding; None computes padding.
        longest: the longest sequence, in tokens.
    """

    rows: int
    length: int
    tokens: int | None
    longest: int


def bucket_of(rows: int, length: int, tokens: int | None, longest: int, limit: int) -> Bucket:
    """Return the bucket for inputs of these sizes: at most an eighth more tokens, or rows if padding is computed.

    Args:
        limit: the most positions that the model has, which no length exceeds.
    """
    if tokens is None:
        length = min(round_up(length, 16), limit)
        return Bucket(round_up_by_eighths(rows, 1), length, None, length)
    longest = min(max(power_of_2(longest), 16), limit)
    return Bucket(power_of_2(rows), min(round_up(length, 32), limit), round_up_by_eighths(tokens, 16), longest)


class BucketGraph:
    """One bucket's inputs, the outputs that a replay leaves there, and the replay."""

    def __init__(self, model: "GraphedBertModel", bucket: Bucket, pool: "Pool") -> None:
        size, device = (bucket.rows, bucket.length), model.device
        self.ids, self.segments, self.mask = (torch.zeros(size, dtype=torch.long, device=device) for _ in range(3))
        self.mask[: bucket.tokens, 0] = 1  # while it is recorded; a bucket may have more rows than tokens
        self.model, self.bucket, self.pool = weakref.ref(model), bucket, pool  # a circle would keep its memory longer
        self.replay, self.out, self.bytes = record_forward(self.run, pool)

    def run(self) -> Tensor:
        """Return the last hidden states of the inputs, (B, S, D)."""
        model, tokens = self.model(), self.bucket.tokens
        assert model is not None
        backend = model.backend_for(self.bucket.longest)

        # No kernel leaves padding out at this length, or something reads it: the plain forward computes it.
        if tokens is None or backend is None:
            out = BertModel.forward(model, self.ids, self.mask, self.segments, skip_padding=False, return_dict=True)
            return out.last_hidden_state

        # A graph cannot depend on how many tokens are real, so they are packed into as many slots as the bucket has.
        positions = count_positions(self.ids, model.config) if model.config.positions_skip_padding else None
        packed: tuple[Tensor | None, ...]
        if model.fused:
            layout, packed = pack_rows(self.ids, self.segments, self.mask, positions, tokens, self.bucket.longest)
        else:
            layout = Slots.of_rows(self.mask.ne(0), tokens, self.bucket.longest, rest=False)
            packed = layout.pack_inputs(self.ids, self.segments, positions, None)

        x, _ = model.encoder(model.embeddings(*packed), inputs=LayerContext(backend, layout, places=packed[2]))
        return unpack_rows(layout, x) if model.fused else layout.unpack(x)

    def __call__(self, ids: Tensor, mask: Tensor | None, segments: Tensor | None) -> Tensor:
        """Return the last hidden states, (B, S, D), in memory of their own."""
        rows, length = ids.shape
        if ids.shape != self.ids.shape:
            for kept in (self.mask, self.ids, self.segments) if self.bucket.tokens is None else (self.mask,):
                kept.zero_()  # embeddings read what an earlier batch has left, unless they are of packed tokens
        for kept, given, default in ((self.ids, ids, 0), (self.mask, mask, 1), (self.segments, segments, 0)):
            inside = kept[:rows, :length]
            if given is None:
                inside.fill_(default)
            else:
                inside.copy_(given)
        self.replay()
        return self.out[:rows, :length].clone()


def count_tokens(mask: Tensor, gapless: bool = False) -> tuple[int | None, int]:
    """Return the number of tokens of rows, and of the longest; None and S if a row does not begin with a token.

    The host waits for the GPU.

    Args:
        gapless: return None also if padding lies between the tokens of a row.
    """
    real = mask.ne(0)
    packs = real[:, 0].all()
    if gapless:
        packs = packs & (real[:, 1:] <= real[:, :-1]).all()
    known, *lengths = torch.cat([packs[None], real.sum(1)]).tolist()
    return (sum(lengths), max(lengths)) if known else (None, mask.shape[1])


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Let a GPU be the current one within a block: Triton and graphs take that."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def record_forward(run: Callable[[], Tensor], pool: "Pool") -> tuple[Callable[[], None], Tensor, int]:
    """Record a forward; return the function that runs it again, its output and the bytes that it keeps."""
    for _ in range(WARM_UPS):
        run_aside(run)
    return record_run(run, pool)


@cache
def side_stream(device: int) -> Any:
    """Return the stream of a GPU for warm-ups."""
    return own_stream(device)


def own_stream(device: Any) -> Any:
    """Return a stream of a GPU that no warm-up and no pool has, while one is left of the 32 that torch gives in turn.

    Graphs keep the address of cuBLAS's workspace, of which each stream has its own.  torch 2.13 frees it with any
    graph of the stream (pytorch#193402).  If only a pool's recordings use a stream, it lies in that pool, which stays
    until its last graph goes.
    """
    streams = (torch.cuda.Stream(device) for _ in range(32))
    found = next((stream for stream in streams if stream not in STREAMS), None) or torch.cuda.Stream(device)
    STREAMS.add(found)
    return found


def run_aside(run: Callable[[], Tensor]) -> Tensor:
    """Run once on another stream, as before a recording: memory is allocated and kernels are chosen."""
    side, here = side_stream(torch.cuda.current_device()), torch.cuda.current_stream()
    with RECORDING:
        side.wait_stream(here)
        try:
            with torch.cuda.stream(side):
                return run()
        finally:
            here.wait_stream(side)


def record_run(run: Callable[[], Tensor], pool: "Pool | None" = None) -> tuple[Callable[[], None], Tensor, int]:
    """Record a run without running it; return what `record_forward` does.

    Args:
        pool: memory to share with other graphs, none of which keeps anything between its replays; keep it with them.
    """
    with RECORDING:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # `torch.cuda.graph` does it too, and would reduce the reserved bytes
        reserved, graph = torch.cuda.memory_reserved(), torch.cuda.CUDAGraph()
        pool = pool or Pool(torch.device("cuda", torch.cuda.current_device()))
        # The outer block restores the stream also if the end of the capture raises: torch's own then does not.
        with (
            torch.cuda.stream(pool.stream),
            torch.cuda.graph(graph, pool=pool.handle, stream=pool.stream, capture_error_mode="thread_local"),
        ):
            out = run()
        return graph.replay, out, torch.cuda.memory_reserved() - reserved


class Pool:
    """Memory that graphs share, since each output is copied before the next replay, and the stream of recordings.

    torch frees the memory when none of its graphs is left, and takes its handle no more.
    """

    def __init__(self, device: torch.device) -> None:
        self.bytes = self.limit = 0
        if device.type == "cuda":
            self.handle, self.stream = torch.cuda.graph_pool_handle(), own_stream(device)


class Graphs:
    """The graphs of one model, by bucket; those unused for longest go first."""

    def __init__(self) -> None:
        self.made: OrderedDict[Bucket, BucketGraph] = OrderedDict()
        self.pool: Pool | None = None  # the newest, which the next graph shares
        self.hooks: list[Any] | None = None  # the dicts of all modules; to collect them takes longer than a forward
        self.lock = RLock()  # a graph has one place for its inputs
        self.done: Any = None  # the event after the last replay: on another stream the next one waits for it

    @property
    def pools(self) -> list[Pool]:
        """The memory of all graphs; the pool that was used last comes first."""
        return [*dict.fromkeys(graph.pool for graph in reversed(self.made.values()))]

    def __reduce__(self) -> tuple[type["Graphs"], tuple[()]]:
        return Graphs, ()  # a copy of a model records its own

    def run(
        self, model: "GraphedBertModel", bucket: Bucket, ids: Tensor, mask: Tensor | None, segments: Tensor | None
    ) -> Tensor | None:
        """Return the last hidden states, (B, S, D); None, with a warning, if there is no memory for the graph.

        Also None if another thread has just dropped it: a model's lock is taken after RECORDING and never before, as a
        training step that records and runs this model does, or both could wait for each other.
        """
        on_gpu, is_new = model.device.type == "cuda", bucket not in self.made

        # Recording forbids other work on the GPU, so only a new graph waits for its turn.
        with RECORDING if is_new else nullcontext(), self.lock, torch.inference_mode(False), torch.no_grad():
            # Graphs share their memory: on another stream this one waits until the last output has been copied.
            stream = torch.cuda.current_stream() if on_gpu else None
            if stream is not None and self.done is not None:
                stream.wait_event(self.done)

            graph = self.made.get(bucket)
            if graph is None and not is_new:
                return None

            # A graph is a matter of speed: without memory the batch runs plainly, and what graphs held is given back.
            try:
                graph = self.record(model, bucket) if graph is None else graph
            except torch.OutOfMemoryError:
                self.drop([*self.made])
                text = "there was no memory for a CUDA graph: this batch runs without one, and earlier ones go"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
                return None

            self.made.move_to_end(bucket)
            states = graph(ids, mask, segments)
            if stream is not None:
                self.done = stream.record_event()
            if is_new:
                self.make_room()
            return states

    def record(self, model: "GraphedBertModel", bucket: Bucket) -> BucketGraph:
        """Record a graph into the newest pool, or into a new one if no graph is left there or it has grown enough."""
        pool, self.pool = self.pool, None  # torch takes no other graph into the pool of a recording that failed
        if pool not in self.pools or pool.bytes > pool.limit:
            pool = Pool(model.device)

        graph = self.made[bucket] = BucketGraph(model, bucket, pool)
        pool.bytes += graph.bytes
        pool.limit = pool.limit or min(pool.bytes + GROWTH, BYTES)
        self.pool = pool
        return graph

    def make_room(self) -> None:
        """Drop the graphs beyond BUCKETS, and beyond BYTES the pools unused for longest; the newest one may be larger.

        Memory comes back only when no graph of a pool is left, so all of a pool go at once.
        """
        self.drop([*self.made][:-BUCKETS])
        while len(pools := self.pools) > 1 and sum(pool.bytes for pool in pools) > BYTES:
            self.drop([bucket for bucket, graph in self.made.items() if graph.pool is pools[-1]])

    def drop(self, buckets: Iterable[Bucket]) -> None:
        """Free graphs, when the GPU has run them."""
        for bucket in buckets:
            if self.done is not None:
                self.done.synchronize()
            del self.made[bucket]


class GraphedBertModel(QuickBertModel):
    """BertModel whose usual forward replays a graph."""

    graphs: Graphs
    fused: bool  # kernels of Triton run what surrounds matmuls
    needs: Requirements
    packed_backend: Backend | None  # leaves padding out under graphs, at any length; None: padding is computed

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Run BERT as its base class does, on its own GPU."""
        with current(self.device):
            return super().forward(*inputs, **options)

    def backend_for(self, longest: int) -> Backend | None:
        """Return the backend that leaves padding out for texts of up to `longest` tokens; None: it is computed."""
        by_place = self.config.position_embedding_type in ("absolute", "bucketed")
        return SHORT if by_place and missing_for_short(self.needs, longest) is None else self.packed_backend

    def is_plain(self, ids: Any, mask: Any) -> bool:
        """Return whether a graph computes what the modules would, and no hook sees these."""
        if not (isinstance(ids, Tensor) and ids.dim() == 2 and ids.numel() and values_readable(ids)):
            return False
        name = self.attention_name()
        return (
            ids.shape[1] <= self.config.max_position_embeddings  # or BertBody's error names it
            and ids.device == self.device
            and (name in ("auto", "sdpa") or name in PACKING)
            and not torch.is_autocast_enabled(ids.device.type)
            and "choose_layout" not in vars(self)  # a training step records it and would record no replay
            and not self.has_hooks()
        )

    def has_hooks(self) -> bool:
        """Return whether a module has hooks, of those there were at the first call."""
        if self.graphs.hooks is None:
            self.graphs.hooks = [hooks for part in self.modules() for hooks in hooks_of(part)]
        return any(self.graphs.hooks)

    def run_at_once(
        self, given: Inputs, ends: Any, first_only: bool, encoded: bool, skips: bool | None
    ) -> States | None:
        """Return the outputs of a graph; None if inputs are rare or many, so that graphs do not pay: BertBody runs."""
        input_ids, mask, segments, positions = given

        # Rare inputs would need graphs of their own, and the plain forward has the better messages for wrong ones.
        others = [x for x in (mask, segments) if x is not None]
        if positions is not None or ends is not None or not all(isinstance(x, Tensor) for x in others):
            return None
        if any(x.shape != input_ids.shape or x.device != self.device or x.is_floating_point() for x in others):
            return None
        if input_ids.dtype not in INDICES or (segments is not None and segments.dtype not in INDICES):
            return None

        # Count the tokens to compute: the real ones if padding may be left out, else all positions.
        rows, length = input_ids.shape
        tokens: int | None = rows * length
        longest = length
        of_tokens = encoded and not first_only  # for a head of tokens, which takes rows
        if of_tokens or self.backend_for(1) is None or not self.skips_padding(skips):
            tokens = None
        elif mask is not None:  # the only wait for the GPU
            kind = POSITIONS[self.config.position_embedding_type]  # some kinds count positions, not slots
            tokens, longest = count_tokens(mask, gapless=kind.in_scores or kind.has_windows)
        if self.backend_for(longest) is None:
            tokens, longest = None, length

        # To pack by itself, a body would read the mask while it is recorded.
        if tokens is None and (name := self.attention_name()) in PACKING:
            text = f"a batch runs without a CUDA graph, since {name!r} reads its mask"
            warnings.warn(f"{text}; attn_implementation='auto' computes padding here", RuntimeWarning, stacklevel=5)
            return None

        # Many tokens keep the GPU busy longer than Python takes to launch, so a graph would gain nothing.
        if (rows * length if tokens is None else tokens) > MOST_TOKENS:
            return None

        bucket = bucket_of(rows, length, tokens, longest, self.config.max_position_embeddings)
        states = self.graphs.run(self, bucket, input_ids, mask, segments)
        if states is None:
            return None

        # The graph ends at the hidden states; the pooler is a single matmul behind it.
        states = states[:, :1] if first_only else states
        return states, None if self.pooler is None else self.pooler(states)


def use_graphs_(model: BertPreTrainedModel) -> None:
    """Let graphs run the body of a model that only runs.

    Raises:
        ValueError: graphs cannot run the model; the message names the reason.
    """
    body, config = model.base_model, model.config
    if model.device.type != "cuda":
        raise ValueError(f"CUDA graphs are for a GPU and the model is on {model.device}: use backend='auto'")
    if own_field(config, "pooling") == "mean":
        raise ValueError("CUDA graphs do not compute the mean of tokens (pooling 'mean'): use backend='plain'")
    if type(body) is not BertModel or config.is_decoder:
        raise ValueError(f"CUDA graphs run encoders, not {type(body).__name__}: use backend='plain'")

    # The padding of long texts is left out only if this GPU has an attention for it.
    needs = Requirements(
        relative=(kind := POSITIONS[config.position_embedding_type]).in_scores or kind.has_windows,
        device=model.device,
        dtype=model.dtype,
        head_dim=config.hidden_size // config.num_attention_heads,
    )
    varlen, kind = BACKENDS["varlen"], config.position_embedding_type
    missing = None if varlen.missing is None else varlen.missing(needs)
    if not knows_positions(kind):
        missing = f"a graph that leaves it out cannot compute {kind} positions"

    # The body keeps its modules and changes its class, so names, hooks and weights stay as they are.
    body.__class__ = GraphedBertModel
    vars(body).update(graphs=Graphs(), needs=needs, packed_backend=None if missing else varlen)
    assert isinstance(body, GraphedBertModel)
    body.fused = fuse_(body)
    packs = body.encoder.leaves_padding_out = body.backend_for(1) is not None

    if missing is not None:
        longer = f" if a text has more than {longest_for(needs)} tokens" if packs else ""
        warnings.warn(f"CUDA graphs compute padding here{longer}: {missing}", stacklevel=4)
