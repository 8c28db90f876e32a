"""Serving: requests join and leave a running batch at any step, and get their tokens as they come."""

from __future__ import annotations

import time
from collections import deque

from page4.kernels.errors import InputError
from page4.kvcache.pages import pages_for

from .engine import SpeculativeDecoder, StepInFlight
from .preemption import Preemption
from .request import Phase, Request
from .served import Served, ServingStats


class Server:
    """Runs requests of a decoder in one batch.

    A step prefills a chunk of every prompt that is not done and then decodes all that are. Each prompt is a
    forward pass of its own: what it leaves in the cache depends on no other, to the last bit.

    A request is admitted, in order of arrival, when a row is free and the pages that it may need are neither
    taken nor promised, so no request ever waits for pages once it runs. With preemption the pages of its
    prompt and of the next steps are enough, see :mod:`page4.spec_decode.preemption`.

    Args:
        decoder: nothing else uses it meanwhile.
        overlap: launch a step before the outcome of the one before is read, so that the device does not wait
            for the host. A request is found to be finished one step later then, and that step is discarded.
            Default: on a GPU.
    """

    def __init__(self, decoder: SpeculativeDecoder, overlap: bool | None = None) -> None:
        self.decoder = decoder
        self.overlap = decoder.model.device.type == "cuda" if overlap is None else overlap
        self.stats = ServingStats()
        self._waiting: deque[Served] = deque()
        self._running: dict[Request, Served] = {}
        self._in_flight: StepInFlight | None = None
        self._since = 0.0
        self._preemption = Preemption(decoder, self.stats) if decoder.config.preemption else None

    @property
    def busy(self) -> bool:
        """Whether any request is not finished."""
        return bool(self._waiting or self._running)

    def submit(self, served: Served) -> None:
        """Queues a request; allowed at any time, also from a callback.

        Raises:
            InputError: the request can never run: its prompt or options are refused, or it may become longer
                than ``max_length`` or the cache.
        """
        if served.max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {served.max_new_tokens}, expected at least 1")
        self.decoder.check(served.prompt, served.sampling)
        limit = self.decoder.config.max_length
        if served.length > limit:
            raise InputError(
                f"the prompt has {len(served.prompt)} tokens and {served.max_new_tokens} more are asked for, "
                f"max_length is {limit}"
            )
        total = self.decoder.cache.tables.pool.total
        if self._pages(served) > total:
            raise InputError(
                f"the request may need {self._pages(served)} pages, the cache has {total}: raise max_tokens"
            )
        self._waiting.append(served)

    def cancel(self, served: Served) -> None:
        """Ends a request where it is."""
        served.finished = True
        if served in self._waiting:
            self._waiting.remove(served)
        for request, running in list(self._running.items()):
            if running is served:
                self._leave(request)

    def step(self) -> None:
        """One step of all requests."""
        if not self._running and self._in_flight is None:
            self._since = time.perf_counter()
        self._admit()
        prefilled = self._prefill()
        decoding = [request for request in self._running if request.phase is Phase.DECODE]
        decoding = self._make_room(decoding)
        launched = self._launch(decoding) if decoding else None
        if self.overlap:
            launched, self._in_flight = self._in_flight, launched
        emitted = 0
        if launched is not None:
            for request, tokens in self.decoder.collect(launched).items():
                if request in self._running:  # a callback may have cancelled it just now
                    emitted += self._emit(request, tokens)
        self._account(prefilled, emitted, collected=launched is not None)

    def run(self) -> None:
        """Steps until every request is finished."""
        while self.busy:
            self.step()
        self._in_flight = None  # of finished requests alone

    def close(self) -> None:
        """Ends all requests."""
        for served in [*self._waiting, *self._running.values()]:
            self.cancel(served)
        self._in_flight = None

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.decoder.config.max_requests:
            served = self._waiting[0]
            if not self._has_room(served):
                return
            try:
                if self._preemption is None:
                    request = self.decoder.open(served.prompt, served.sampling)
                else:
                    request = self._preemption.open(served)
            except InputError:
                if not self._running:
                    raise
                return  # later, with what the others give back
            self._waiting.popleft()
            self._running[request] = served

    def _has_room(self, served: Served) -> bool:
        if self._preemption is not None:
            return self._preemption.has_room(served)
        promised = sum(map(self._pages, self._running.values()))
        return promised + self._pages(served) <= self.decoder.cache.tables.pool.total

    def _make_room(self, decoding: list[Request]) -> list[Request]:
        """Those of the requests that have pages for their next step, after others have lost theirs."""
        if self._preemption is None:
            return decoding
        while (victim := self._preemption.victim(decoding, self._running)) is not None:
            self.stats.preemptions += 1
            self._running[victim].preemptions += 1
            self._put_back(victim)
            decoding = [request for request in decoding if request is not victim]
        return decoding

    def _put_back(self, request: Request) -> None:
        """A running request waits again, before all that came later."""
        self._waiting.appendleft(self._running[request])
        self._leave(request)

    def _prefill(self) -> int:
        """Prefills a chunk of each unfinished prompt; returns the number of tokens."""
        chunk = self.decoder.config.prefill_chunk
        waiting = [request for request in self._running if request.phase is Phase.PREFILL]
        prefilling = [request for request in waiting if self.decoder.restored(request)]
        if not prefilling and len(waiting) == len(self._running):
            prefilling = waiting  # nothing else to do until their prefixes are back
        tokens = 0
        for request in prefilling:
            before = request.computed
            stop = min(before + chunk, request.prompt_length - 1)
            if stop > before:
                self.decoder.prefill({request: stop})
            if stop == request.prompt_length - 1:
                self.decoder.start(request)
            tokens += stop - before
        return tokens

    def _launch(self, requests: list[Request]) -> StepInFlight:
        """Launches a step; what it takes to capture a new shape counts nowhere."""
        start = time.perf_counter()
        self.decoder.prepare(requests)
        self._since += time.perf_counter() - start
        return self.decoder.launch(requests)

    def _emit(self, request: Request, tokens: list[int]) -> int:
        """Hands out new tokens up to the request's end; returns their number."""
        served = self._running[request]
        accepted = request.accepted
        if self._preemption is not None:
            new = self._preemption.unknown(request, served, tokens)
            if new is None:
                self._put_back(request)
                return 0
            if not new:
                return 0
            tokens, accepted = new, self._preemption.accepted(request, served)
        new = tokens[: served.max_new_tokens - len(served.tokens)]
        ends = [i for i, token in enumerate(new) if token in served.stop_token_ids]
        if ends:
            new = new[: ends[0] + 1]
        served.tokens += new
        served.accepted = accepted
        if ends or len(served.tokens) == served.max_new_tokens:
            served.finished = True
            self._leave(request)
        if served.on_tokens is not None:
            served.on_tokens(served, new)
        return len(new)

    def _leave(self, request: Request) -> None:
        del self._running[request]
        self.decoder.close(request)

    def _account(self, prefilled: int, emitted: int, collected: bool) -> None:
        if not prefilled and not collected:
            return
        now = time.perf_counter()
        elapsed, self._since = now - self._since, now
        if prefilled:
            self.stats.prefill_tokens += prefilled
            self.stats.prefill_seconds += elapsed
        else:
            self.stats.step_seconds.append(elapsed)
            self.stats.decode_tokens += emitted

    def _pages(self, served: Served) -> int:
        return pages_for(served.length + self.decoder.config.overrun)
