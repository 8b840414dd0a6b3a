"""Many answers at once: a batch of rows that is refilled as rows finish, one CUDA graph per step.

    tokens   [rows, width]   prompt, then what was written; on the device
    place    [rows]          position of the row's last token, whose K and V are not there yet
    keys, values             [layers, rows, kv heads, width, head size]

A step computes the last token of every row, draws the next and writes it behind. Rows that are done
write their last token again, which changes nothing, until the next refill.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch

from srt.spec.train.fuse import fuse
from srt.spec.train.target import Causal, DenseTarget

STEPS_PER_ROUND = 24  # between two looks at who is done
PREFILL_TOKENS = 32768  # of one forward, padding included


@dataclass(frozen=True, slots=True)
class Wish:
    """`prompt` ids; temperature 0: greedy; at most `most` new tokens. `label` says what it is."""

    prompt: list[int]
    temperature: float
    most: int
    label: str = ""


@dataclass(frozen=True, slots=True)
class Written:
    """Prompt and answer; the answer's last token is an end token unless it was cut."""

    wish: Wish
    tokens: list[int]

    @property
    def answer(self) -> list[int]:
        return self.tokens[len(self.wish.prompt) :]


class Writer:
    """`min_share`: a drawn token has at least this share of the likeliest one's probability."""

    def __init__(
        self, target: DenseTarget, *, rows: int, width: int, stops: list[int],
        min_share: float = 0.05,
    ) -> None:  # fmt: skip
        arch, device = target.arch, target.device
        self.width = width
        self._target = target
        self._min_share = min_share
        shape = (arch.num_layers, rows, arch.num_kv_heads, width, arch.head_dim)
        self._keys = torch.zeros(shape, dtype=target.dtype, device=device)
        self._values = torch.zeros(shape, dtype=target.dtype, device=device)
        self._tokens = torch.zeros(rows, width, dtype=torch.int64, device=device)
        self._place = torch.zeros(rows, dtype=torch.int64, device=device)
        self._end = torch.zeros(rows, dtype=torch.int64, device=device)  # last place to write
        self._temperature = torch.zeros(rows, dtype=torch.float32, device=device)
        self._done = torch.ones(rows, dtype=torch.bool, device=device)
        self._stops = torch.tensor(stops, dtype=torch.int64, device=device)
        self._rows_index = torch.arange(rows, device=device)
        self._columns = torch.arange(width, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self.steps = 0  # taken so far

    @torch.inference_mode()
    def write(self, wishes: Iterable[Wish], until: float | None = None) -> Iterator[Written]:
        """Answers in the order they end. A prompt that leaves no room in `width` is skipped. After the
        time `until` (of time.monotonic) no row is filled again, and unfinished ones are dropped;
        `wishes` may then be endless."""
        source = (wish for wish in wishes if 0 < len(wish.prompt) < self.width)
        rows = len(self._rows_index)
        waiting = deque(islice(source, rows))
        held: dict[int, Wish] = {}
        while True:
            done = self._done.nonzero().flatten().tolist()
            yield from self._take([row for row in done if row in held], held)
            if until is not None and time.monotonic() > until:
                self._done.fill_(True)
                return
            new = {row: waiting.popleft() for row in done[: len(waiting)]}
            held |= new
            self._fill(new)
            if not held:
                return
            for _ in range(STEPS_PER_ROUND):
                self._step()
            self.steps += STEPS_PER_ROUND
            waiting.extend(islice(source, rows - len(waiting)))  # while the device is busy

    def _take(self, finished: list[int], held: dict[int, Wish]) -> Iterator[Written]:
        if not finished:
            return
        index = torch.tensor(finished, device=self._target.device)
        texts, places = self._tokens[index].cpu(), self._place[index].tolist()
        for row, text, place in zip(finished, texts, places, strict=True):
            yield Written(held.pop(row), text[: place + 1].tolist())

    def _fill(self, new: dict[int, Wish]) -> None:
        """Prompts of like lengths together, so that little is padded."""
        order = sorted(new, key=lambda row: len(new[row].prompt), reverse=True)
        while order:
            longest = len(new[order[0]].prompt)
            count = max(1, PREFILL_TOKENS // longest)
            self._prefill({row: new[row] for row in order[:count]}, longest)
            order = order[count:]

    def _prefill(self, new: dict[int, Wish], longest: int) -> None:
        device = self._target.device
        rows = torch.tensor(list(new), device=device)
        padded = [wish.prompt + [0] * (longest - len(wish.prompt)) for wish in new.values()]
        tokens = torch.tensor(padded, device=device)
        lengths = torch.tensor([len(wish.prompt) for wish in new.values()], device=device)
        most = torch.tensor([wish.most for wish in new.values()], device=device)
        self._tokens[rows, :longest] = tokens
        self._place[rows] = lengths - 1
        self._end[rows] = (lengths - 1 + most).clamp(max=self.width - 1)
        self._temperature[rows] = torch.tensor(
            [wish.temperature for wish in new.values()], device=device
        )
        self._done[rows] = False
        causal = Causal(self._target.arch.windows)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self._keys[layer, rows, :, :longest] = k
            self._values[layer, rows, :, :longest] = v
            return causal(layer, q, k, v)

        self._target.forward(tokens, attend)

    def _step(self) -> None:
        if self._target.device.type != "cuda":
            self._advance()
        elif self._graph is None:
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._advance()
            torch.cuda.current_stream().wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._advance()
        else:
            self._graph.replay()

    def _advance(self) -> None:
        place = self._place[:, None]
        last = self._tokens.gather(1, place)
        masks = {window: self._mask(window) for window in set(self._target.arch.windows)}

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return self._attend(layer, q, k, v, masks[self._target.arch.windows[layer]])

        found = self._target.forward(last, attend, positions=place)
        logits = self._target.head(found.hidden[:, 0])
        drawn = draw(logits, self._temperature, math.log(self._min_share))
        following = torch.where(self._done, self._place, self._place + 1)
        token = torch.where(self._done, last[:, 0], drawn)
        self._tokens.scatter_(1, following[:, None], token[:, None])
        self._place.copy_(following)
        self._done |= torch.isin(token, self._stops) | (following >= self._end)

    def _attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """The heads that share a K and V head stand in the place of query positions: nothing is
        repeated, and K and V are read once."""
        keys, values = self._keys[layer], self._values[layer]
        keys[self._rows_index, :, self._place] = k[:, :, 0]
        values[self._rows_index, :, self._place] = v[:, :, 0]
        rows, heads, _, size = q.shape
        grouped = q.view(rows, keys.shape[1], heads // keys.shape[1], size)
        mixed = masked_softmax(grouped @ keys.mT, mask, size**-0.5) @ values
        return mixed.reshape(rows, heads, 1, size)

    def _mask(self, window: int | None) -> torch.Tensor:
        """[rows, 1, 1, width], to be added: each row's tokens up to its last."""
        back = self._place[:, None] - self._columns
        hidden = back < 0 if window is None else (back < 0) | (back >= window)
        mask = torch.zeros(back.shape, dtype=torch.float32, device=back.device)
        return mask.masked_fill_(hidden, -torch.inf)[:, None, None]


@fuse
def masked_softmax(scores: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    return (scores.float() * scale + mask).softmax(dim=-1).to(scores.dtype)


@fuse
def draw(logits: torch.Tensor, temperature: torch.Tensor, floor: float) -> torch.Tensor:
    """logits [rows, V], temperature [rows] -> tokens [rows]: greedy at 0, else by Gumbel's trick: the
    arg max of logits / temperature plus noise is a draw. `floor`: the writer's, as a logarithm."""
    scaled = logits.float() / temperature.clamp(min=1e-3)[:, None]
    best = scaled.amax(dim=-1, keepdim=True)
    noise = -torch.log(-torch.log(torch.rand_like(scaled).clamp(min=1e-20, max=1 - 1e-7)))
    noise = torch.where(temperature[:, None] > 0, noise, 0.0)
    return torch.where(scaled >= best + floor, scaled + noise, -torch.inf).argmax(dim=-1)
