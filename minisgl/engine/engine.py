"""Computes plans: host arrays in, sampled tokens out. Holds the model, the KV pool and the page table of one rank.

Knows no requests and no queues: everything it needs is in the Batch. Called by the scheduler.

Letters: T new tokens, B rows, S sampled rows, V vocabulary.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from minisgl.attention import BaseAttentionBackend, choose_attention_backends, make_attention_backend
from minisgl.attention.probe import TRIAL_PAGES, why_not
from minisgl.core import Batch, Context, Int32Array
from minisgl.distributed import Communicator, make_communicator
from minisgl.distributed.groups import Groups, join_groups
from minisgl.engine.base import EngineLimits, StepLogprobs
from minisgl.engine.config import DEFAULT_EXTEND_TOKENS, EngineConfig
from minisgl.engine.logprobs import PROMPT_LOGITS, Logprobs, PendingLogprobs, compute_logprobs, read_back
from minisgl.engine.memory import (
    MAX_EXTEND_GRAPH_TOKENS,
    available_bytes,
    extend_graph_bytes,
    extend_graph_rows,
    extend_graph_size,
    graph_bytes,
    graph_sizes,
    plan_memory,
)
from minisgl.engine.peak import DEMANDING, largest_batch, measure_step
from minisgl.engine.sampler import Sampler
from minisgl.errors import ConfigError, WorkerError
from minisgl.kernel.packed import can_pack
from minisgl.kernel.staging import Pending, Readback, Uploader
from minisgl.kvcache.pool import make_kv_pool
from minisgl.layers.attention import local_kv_heads
from minisgl.layers.base import Spec
from minisgl.models.config import ModelConfig, load_model_config
from minisgl.models.decoder import CausalLM
from minisgl.models.resolve import resolve_model
from minisgl.models.weights import digest_whole, fill_dummy, load_weights
from minisgl.moe import default_moe_backend
from minisgl.tokenizer.loader import load_ids
from minisgl.utils import make_private_directory

if TYPE_CHECKING:
    from minisgl.engine.graphs import StepGraphs

__all__ = ["Engine", "choose_device", "choose_dtype", "choose_max_seq_len", "make_engine"]

logger = logging.getLogger(__name__)

DEFAULT_PAGE_SIZE = {"cpu": 16, "cuda": 64}
REHEARSED_TOKENS = (512, 1, 2, 3, 4)
"""Steps without graphs: more than the products of few rows take and less than takes time, and all that those tell apart."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that was launched; reading waits for the device."""

    tokens: Pending
    """[S]"""
    num_top: list[int]
    """[S] likeliest tokens wanted; -1: the row wants no log probabilities"""
    logprobs: PendingLogprobs | None
    """of the rows that want them, then of the prompt targets"""

    def read_logprobs(self) -> StepLogprobs:
        with _device_failures():
            entries = iter(self.logprobs.read() if self.logprobs is not None else ())
        return StepLogprobs(tuple(next(entries) if count >= 0 else None for count in self.num_top), tuple(entries))

    def read(self) -> Int32Array:
        with _device_failures():
            return self.tokens.read()


@contextmanager
def _device_failures() -> Iterator[None]:
    """Raise WorkerError for what the device reports; after an illegal access every later call of this process fails as well."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise WorkerError(f"the device failed; begin again in a new process: {error}") from error


@contextmanager
def _out_of_memory(batch: Batch) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        size = f"{batch.num_tokens} new tokens of {batch.num_rows} requests"
        hint = "lower --memory-ratio, --max-extend-tokens or --max-running-requests"
        raise WorkerError(f"out of memory in a step of {size}; {hint}: {error}") from error


class Engine:
    """One rank's model with its pool, ready to compute."""

    def __init__(
        self,
        model: CausalLM,
        attention: BaseAttentionBackend,
        comm: Communicator,
        limits: EngineLimits,
        cpu_group: dist.ProcessGroup | None,
        max_graph_rows: int = 0,
        max_graph_tokens: int = 0,
    ) -> None:
        """`attention` holds the pool and the page table, int32 [max_running_req + 1, pages per row], that this engine updates.

        Decode steps of at most `max_graph_rows` rows are CUDA graphs, and prefill steps of few rows with at most `max_graph_tokens` new
        tokens; 0: none is.
        """
        self.limits = limits
        self.cpu_group = cpu_group
        self.model = model
        self._attention = attention
        self._comm = comm
        self._device = attention.pool.k.device
        self._reduce_only = Context(None, None, None, comm)
        self._sampler = Sampler(limits.max_running_req, min(limits.num_known_ids, limits.vocab_size), self._device)
        self._last_tokens = torch.zeros(limits.max_running_req + 1, dtype=torch.int64, device=self._device)
        """[slots] the token that each slot sampled last, and one for padding"""
        self._upload = Uploader(self._device)
        self._readback, self._logprobs_readback = Readback(self._device), Readback(self._device)
        self._graphs: list[StepGraphs] = []
        if max_graph_rows:
            self._graphs = self._make_graphs(max_graph_rows, max_graph_tokens)

    def _make_graphs(self, max_rows: int, max_tokens: int) -> list[StepGraphs]:
        from minisgl.engine.extend_graphs import ExtendGraphs
        from minisgl.engine.graphs import DecodeGraphs, GraphParts, Recorder

        attention = self._attention.graph_part
        assert attention is not None
        parts = GraphParts(self.model, attention, self._comm, self._sampler, self._last_tokens, Recorder(self._device))
        graphs: list[StepGraphs] = [DecodeGraphs(parts, max_rows)]
        return [*graphs, ExtendGraphs(parts, max_tokens)] if max_tokens else graphs

    def compile_ahead(self) -> None:
        """On a GPU, compile the kernels of all steps side by side. This engine has a pool of one page and computes nothing afterwards.

        Launches are noted and not made, so nothing that is computed here has a meaning; log probabilities would take it for token ids.
        Each rank compiles its share. Raises what `submit` raises.
        """
        from minisgl.kernel.gpu.launch import collecting, compile_together

        graphs, self._graphs = self._graphs, []
        num_captured = max(graphs[0].sizes) if graphs else 0
        counts = [*REHEARSED_TOKENS, *(size for size in graph_sizes(self.limits.max_running_req) if size > num_captured)]
        batches = [largest_batch(self.limits, count, replace(DEMANDING, logprobs=None)) for count in counts]
        with collecting() as noted, torch.inference_mode(), _out_of_memory(batches[0]), _device_failures():
            for batch in batches:
                self._submit(batch)
            for own in graphs:
                own.rehearse()
            torch.cuda.synchronize()
        share = slice(None) if self.cpu_group is None else slice(dist.get_rank(self.cpu_group), None, dist.get_world_size(self.cpu_group))
        compile_together(list(noted.values())[share])
        if self.cpu_group is not None:
            dist.barrier(self.cpu_group)

    @property
    def can_be_captured(self) -> bool:
        """Whether the attention takes part in CUDA graphs."""
        return self._attention.graph_part is not None

    @property
    def extends_in_graphs(self) -> bool:
        """Whether it does in those of prefill steps."""
        return self._attention.extends_in_graphs

    def close(self) -> None:
        """Leave the ranks' groups. The memory goes with the object; but NCCL would wait for the end of graphs that hold its calls."""
        if self.cpu_group is not None and dist.is_initialized():
            self._graphs = []
            if self._device.type == "cuda":
                with suppress(torch.AcceleratorError):  # the device has failed before
                    torch.cuda.synchronize(self._device)
            dist.destroy_process_group()

    def submit(self, batch: Batch) -> _Step:
        """Compute one step; on a GPU, launch it. Raises WorkerError with the step's size if the memory does not suffice, and where the
        device has failed."""
        with torch.inference_mode(), _out_of_memory(batch), _device_failures():
            return self._submit(batch)

    def _submit(self, batch: Batch) -> _Step:
        rows = batch.sample_rows
        slots, positions = batch.slots[rows], (batch.cached_lens + batch.extend_lens)[rows]
        self._sampler.set_up(batch.setups)
        replayed = next((outputs for graphs in self._graphs if (outputs := graphs.run(batch)) is not None), None)
        hidden = None
        if replayed is not None:
            logits, tokens = replayed
        else:
            hidden = self.forward_hidden(batch)
            logits = self.model.lm_head.forward(hidden[: len(rows)], self._reduce_only)
            tokens = self._sampler.sample(logits, slots, positions)
            self._remember(slots, tokens)
        num_top = self._sampler.num_top(slots)
        pieces = self._sampled_logprobs(logits, tokens, num_top)
        if hidden is not None and len(batch.prompt_targets):
            pieces += self._prompt_logprobs(hidden[len(rows) :], batch.prompt_targets)
        return _Step(self._readback.start(tokens), num_top, read_back(pieces, self._logprobs_readback))

    def _remember(self, slots: Int32Array, tokens: torch.Tensor) -> None:
        self._last_tokens[self._to_device(slots)] = tokens.clamp(min=0)

    def _sampled_logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, num_top: list[int]) -> list[Logprobs]:
        wanted = [count for count in num_top if count >= 0]
        if not wanted:
            return []
        rows = self._to_device(np.flatnonzero(np.array(num_top) >= 0).astype(np.int32))
        return [compute_logprobs(logits[rows], tokens[rows].clamp(min=0), wanted)]

    def _prompt_logprobs(self, hidden: torch.Tensor, targets: Int32Array) -> list[Logprobs]:
        """Piece by piece, so that the logits of a long prompt never exist together."""
        pieces = []
        tokens, num_top = self._to_device(targets[:, 1]), targets[:, 2].tolist()  # all in one copy: a block is free after the step only
        for start in range(0, len(targets), PROMPT_LOGITS):
            piece = slice(start, start + PROMPT_LOGITS)
            logits = self.model.lm_head.forward(hidden[piece], self._reduce_only)
            pieces.append(compute_logprobs(logits, tokens[piece], num_top[piece]))
        return pieces

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [S, V] of the batch's sample rows; K/V of its tokens is stored. Called inside inference mode."""
        return self.model.lm_head.forward(self.forward_hidden(batch)[: len(batch.sample_rows)], self._reduce_only)

    def forward_hidden(self, batch: Batch) -> torch.Tensor:
        """Last hidden states [S + L, hidden] of the sample rows' last tokens, then of the prompt targets' tokens."""
        self._update_page_table(batch)
        last_tokens = (batch.extend_lens.cumsum(dtype=np.int32) - 1)[batch.sample_rows]
        wanted = np.concatenate((last_tokens, batch.prompt_targets[:, 0]))
        owners = batch.slots.repeat(batch.extend_lens)
        ids, positions, owners_there, rows = (t.long() for t in self._upload(batch.input_ids, batch.positions, owners, wanted))
        ids = torch.where(ids < 0, self._last_tokens[owners_there], ids)
        context = Context(self._attention, self._attention.prepare(batch), positions, self._comm)
        return self.model.model.forward(ids, rows, context)

    def _update_page_table(self, batch: Batch) -> None:
        updates = batch.table_updates
        if len(updates):
            rows, columns, pages = self._to_device(np.ascontiguousarray(updates)).unbind(1)
            self._attention.page_table[rows, columns] = pages.to(torch.int32)

    def _to_device(self, array: Int32Array) -> torch.Tensor:
        return self._upload(array)[0].long()


def make_engine(
    config: EngineConfig,
    rendezvous: Path | None = None,
    *,
    ids: tuple[frozenset[int], int | None] | None = None,
    log: Callable[[str], None] = logger.info,
) -> Engine:
    """Build the engine that `config` describes: (1) read the model's config, (2) allocate and load, (3) join the other ranks,
    (4) plan memory, on a GPU after the largest step has run once, (5) pool, backend and graphs.

    `ids`: what `tokenizer.loader.load_ids` gives, from a caller who has the tokenizer. `rendezvous`: a fresh file that all ranks of
    several name. Raises ConfigError or ModelFormatError, with what was found and what is allowed, and WorkerError if the ranks do not
    come together, before anything is served.
    """
    model_dir = resolve_model(config.model_path)
    model_config = load_model_config(model_dir)
    device = choose_device(config)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    page_size = config.page_size or DEFAULT_PAGE_SIZE[device.type]
    max_seq_len = choose_max_seq_len(config, model_config)
    dtype = choose_dtype(config, model_config, device)
    available = available_bytes(device)
    described = _try_attention(config, model_config, page_size, max_seq_len, dtype, device)
    model = _load_model(config, model_config, model_dir, Spec(dtype, device, config.tp_info))
    num_bytes = model.num_bytes(can_pack(dtype, device))
    digests = digest_whole(model) if config.tp_info.size > 1 else {}
    model.pack()
    if device.type == "cuda":
        model.model.tabulate(max_seq_len, dtype)
    groups = _join(config, rendezvous, device)
    _check_weights(digests, groups)
    comm = make_communicator(config.tp_info, groups, device)
    end_ids, num_known_ids = load_ids(model_dir) if ids is None else ids

    def build(num_pages: int, max_graph_rows: int, max_graph_tokens: int) -> Engine:
        attention = _make_attention(config, model_config, num_pages, page_size, max_seq_len, dtype, device)
        limits = EngineLimits(
            num_pages=num_pages,
            page_size=page_size,
            max_seq_len=max_seq_len,
            max_running_req=config.max_running_req,
            vocab_size=model_config.vocab_size,
            num_known_ids=num_known_ids or model_config.vocab_size,
            end_ids=end_ids,
            device_type="cuda" if device.type == "cuda" else "cpu",
            is_asynchronous=device.type == "cuda",
        )
        return Engine(model, attention, comm, limits, groups.cpu, max_graph_rows, max_graph_tokens)

    max_graph_rows, max_graph_tokens, step_bytes = 0, 0, 0
    if device.type == "cuda":
        max_graph_rows, max_graph_tokens, step_bytes = _measure(build, config, model_config, dtype, device, available - num_bytes)
    plan = plan_memory(config, model_config, dtype, page_size, available, num_bytes, device.type, step_bytes)
    plan = replace(plan, num_pages=_minimum(plan.num_pages, groups))
    graphs = ", decode steps without CUDA graphs" if device.type == "cuda" and not max_graph_rows else ""
    sums = f"; sums over the ranks: {comm.description}" if config.tp_info.size > 1 else ""
    log(f"attention: {described}{graphs}{sums}; memory: {plan}")
    if config.cuda_graph_max_bs not in (0, EngineConfig.cuda_graph_max_bs) and not max_graph_rows:
        log(f"--cuda-graph-max-bs {config.cuda_graph_max_bs} has no effect: this device, attention or model runs without CUDA graphs")
    if config.num_pages and config.memory_ratio:
        log(f"--memory-ratio {config.memory_ratio:g} has no effect beside --num-pages {config.num_pages}")
    return build(plan.num_pages, max_graph_rows, max_graph_tokens)


def _measure(
    build: Callable[[int, int, int], Engine], config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device, free: int
) -> tuple[int, int, int]:
    """Rows of the largest decode step that is a graph, new tokens of the largest prefill step, and the bytes that steps and graphs take.

    `build`: engines of so many pages, rows and tokens. `free`: bytes that the weights have left; what else is gone once the kernels are
    compiled counts too: tables of positions and pages, the libraries' and the ranks' buffers.
    """
    largest = config.max_extend_tokens or DEFAULT_EXTEND_TOKENS["cuda"]
    trial, max_rows, max_tokens = build(1, 0, 0), 0, 0
    if trial.can_be_captured and (model.moe is None or default_moe_backend(device).supports_graphs):
        max_rows = min(config.cuda_graph_max_bs, config.max_running_req)
        max_tokens = min(MAX_EXTEND_GRAPH_TOKENS, largest) if max_rows and trial.extends_in_graphs else 0
    build(1, max_rows, max_tokens).compile_ahead()
    torch.cuda.empty_cache()
    gone, peak = max(0, free - available_bytes(device)), measure_step(trial, largest)
    share, num_rows = peak * extend_graph_size(max_tokens) // largest if max_tokens else 0, extend_graph_rows(config.max_running_req)
    extend_bytes = extend_graph_bytes(max_tokens, num_rows, share, model.vocab_size, dtype)
    return max_rows, max_tokens, gone + peak + extend_bytes + graph_bytes(graph_sizes(max_rows), model.vocab_size, dtype)


def _join(config: EngineConfig, rendezvous: Path | None, device: torch.device) -> Groups:
    if config.tp_info.size == 1:
        return Groups(None, None)
    if rendezvous is None:
        raise ConfigError(f"{config.tp_info.size} ranks need a rendezvous file, none was given")
    make_private_directory(rendezvous.parent)
    return join_groups(config.tp_info, rendezvous, device)


def _check_weights(digests: dict[str, int], groups: Groups) -> None:
    """Raise WorkerError if the ranks hold different values of a parameter that none of them cuts: their hidden states would part, and no
    ledger shows it, since all ranks sample from gathered logits."""
    if groups.cpu is None:
        return
    own = torch.tensor(list(digests.values()))
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(groups.cpu))]
    dist.all_gather(gathered, own, group=groups.cpu)
    table = torch.stack(gathered)
    for place in (table != table[0]).any(0).nonzero()[:1, 0].tolist():
        shown = ", ".join(f"{digest % 2**64:016x}" for digest in table[:, place].tolist())
        raise WorkerError(
            f"the ranks have loaded different values of {list(digests)[place]}, digests {shown}; check the files, start again"
        )


def _minimum(count: int, groups: Groups) -> int:
    """The smallest `count` of all ranks."""
    if groups.cpu is None:
        return count
    smallest = torch.tensor([count])
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=groups.cpu)
    return int(smallest[0])


def _load_model(config: EngineConfig, model_config: ModelConfig, model_dir: Path, spec: Spec) -> CausalLM:
    try:
        model = CausalLM(model_config, spec)
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"no memory for the weights in {spec.dtype} on {spec.device}: {error}; use a smaller model or --tp") from error
    if config.use_dummy_weight:
        fill_dummy(model, config.seed)
    else:
        load_weights(model, model_dir, model_config, config.tp_info)
    return model


def _make_attention(
    config: EngineConfig, model: ModelConfig, num_pages: int, page_size: int, max_seq_len: int, dtype: torch.dtype, device: torch.device
) -> BaseAttentionBackend:
    attention = model.attention
    num_kv_heads = local_kv_heads(attention.num_kv_heads, config.tp_info.size)
    pool = make_kv_pool(model.num_layers, num_pages, num_kv_heads, page_size, attention.head_dim, dtype, device)
    shape = (config.max_running_req + 1, -(-max_seq_len // page_size))
    page_table = torch.full(shape, pool.dummy_page, dtype=torch.int32, device=device)
    return make_attention_backend(config.attention_backend, pool, page_table)


def _try_attention(
    config: EngineConfig, model: ModelConfig, page_size: int, max_seq_len: int, dtype: torch.dtype, device: torch.device
) -> str:
    """The attention's description. Raises ConfigError, before anything is loaded, if it cannot run; a library is tried with this model."""
    attention = _make_attention(config, replace(model, num_layers=1), TRIAL_PAGES, page_size, max_seq_len, dtype, device)
    if not {"torch", "triton"}.issuperset(choose_attention_backends(config.attention_backend, device.type)):
        problem = why_not(attention, model.attention.num_heads // config.tp_info.size)
        if problem is not None:
            raise ConfigError(f"--attention-backend {config.attention_backend}: this model's attention fails: {problem}; use triton")
    return attention.description


def choose_device(config: EngineConfig) -> torch.device:
    """The device that `config` means on this machine, each rank's own. Raises ConfigError if it names one that is not there."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here; use --device cpu or install a CUDA build of torch")
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("--device cuda: triton is not installed; run `pip install triton`, or use --device cpu")
    if config.tp_info.size > (count := torch.cuda.device_count()):
        raise ConfigError(f"{config.tp_info.size} ranks need a GPU each, {count} found; lower --tp or use --device cpu")
    return torch.device("cuda", config.tp_info.rank)


def choose_dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    """The type of weights, K/V and activations."""
    name = config.dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else model.dtype
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def choose_max_seq_len(config: EngineConfig, model: ModelConfig) -> int:
    """Tokens of the longest sequence. Refuses lengths at which the model would use what we do not compute."""
    longest = config.max_seq_len or model.context_len
    if longest > model.context_len:
        raise ConfigError(f"--max-seq-len {longest}: the model's context is {model.context_len} tokens")
    if model.sliding_window is not None and longest > model.sliding_window:
        raise ConfigError(
            f"the model attends in a sliding window of {model.sliding_window} tokens, which is not supported; "
            f"--max-seq-len {model.sliding_window} serves sequences that fit into one window"
        )
    return longest
