"""Runs every variant and says where its answers differ from the baseline's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from srt.protocols.worker import Idler
from srt.verify.compare import Difference, find_differences
from srt.verify.driver import Driver, Outcomes
from srt.verify.evidence import count, describe
from srt.verify.rig import Rig
from srt.verify.variants import Variant
from srt.wire.messages import Work
from tokenizer_proc.text_stream import TokenBytes

SHIFT = 1000  # between the uids of two rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of a variant. `why_not`: it was not run. `broke`: what it raised, if it did.
    `evidence`: what took place, see `srt.verify.evidence`."""

    name: str
    num_requests: int = 0
    num_equal: int = 0
    differences: list[Difference] = field(default_factory=list)
    evidence: str = ""
    seconds: float = 0.0
    why_not: str | None = None
    broke: str | None = None

    @property
    def is_equal(self) -> bool:
        return self.broke is None and self.num_equal == self.num_requests


class Check:
    """One model, one set of requests. `vocabulary` makes the text that is compared too."""

    def __init__(self, rig: Rig, requests: Sequence[Work], vocabulary: TokenBytes) -> None:
        self._rig = rig
        self._requests = list(requests)
        self._vocabulary = vocabulary
        self._expected: Outcomes = {}

    def run_baseline(self, variant: Variant) -> Row:
        """What all others are compared with. Raises what goes wrong: without it nothing is known."""
        began = time.monotonic()
        driver = self._driver(variant)
        for work in self._requests:
            self._expected.update(driver.run([work]))
        failed = {uid: o.end.failure for uid, o in self._expected.items() if o.end.failure}
        assert not failed, f"requests of the baseline failed: {failed}"
        return Row(
            name=variant.name,
            num_requests=len(self._requests),
            num_equal=len(self._requests),
            evidence=describe(count(list(self._expected.values()), driver), None),
            seconds=time.monotonic() - began,
        )

    def run(self, variant: Variant) -> Row:
        if variant.why_not is not None:
            return Row(name=variant.name, why_not=variant.why_not)
        began = time.monotonic()
        requests = self._requests[: variant.first]
        found: list[Outcomes] = []
        broke, driver = None, None
        try:
            driver = self._driver(variant)
            for number in range(variant.rounds):
                found.append(self._ask(driver, requests, number, variant.stream))
        except Exception as error:  # a variant that breaks is a finding, not the end
            broke = f"{type(error).__name__}: {error}"
        outcomes = [each for one in found for each in one.values()]
        evidence = describe(count(outcomes, driver), variant.about) if driver is not None else ""
        differences = [each for one in found for each in find_differences(one, self._expected)]
        num_found = sum(map(len, found))
        return Row(
            name=variant.name,
            num_requests=len(requests) * variant.rounds,
            num_equal=num_found - len(differences),
            differences=differences,
            evidence=evidence,
            seconds=time.monotonic() - began,
            broke=broke,
        )

    def _ask(self, driver: Driver, requests: Sequence[Work], number: int, stream: bool) -> Outcomes:
        """All at once but for the first three, which run when the others come. By the requests' own
        uids: in later rounds they go by others."""
        asked = [
            msgspec.structs.replace(
                work,
                uid=work.uid + number * SHIFT,
                rid=f"{work.rid}-{number}",
                text=msgspec.structs.replace(work.text, stream=stream),
            )
            for work in requests
        ]
        outcomes = driver.run(asked[:3], asked[3:])
        return {uid - number * SHIFT: outcome for uid, outcome in outcomes.items()}

    def _driver(self, variant: Variant) -> Driver:
        settings = variant.settings
        worker = self._rig.worker(
            num_tokens=variant.num_tokens,
            page_size=variant.page_size,
            max_rows=settings.max_running,
            algorithm=variant.algorithm,
        )
        while variant.is_settled and isinstance(worker, Idler) and worker.idle():
            pass
        if variant.algorithm is None and settings.draft_tokens:
            settings = replace(settings, draft_tokens=0)
        return Driver(worker, settings, vocabulary=self._vocabulary)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    kernels: str
    is_exact: bool
    rows: list[Row]

    @property
    def is_equal(self) -> bool:
        return all(row.is_equal for row in self.rows)


def verify(
    rig: Rig,
    requests: Sequence[Work],
    vocabulary: TokenBytes,
    baseline: Variant,
    variants: Sequence[Variant],
    show: Callable[[str, float], None] = lambda name, fraction: None,
) -> Report:
    """`show` hears which variant runs and how far all of it is."""
    check = Check(rig, requests, vocabulary)
    show(baseline.name, 0.0)
    rows = [check.run_baseline(baseline)]
    for number, variant in enumerate(variants, start=1):
        show(variant.name, number / (len(variants) + 1))
        rows.append(check.run(variant))
    return Report(kernels=rig.kernels, is_exact=rig.is_exact, rows=rows)
