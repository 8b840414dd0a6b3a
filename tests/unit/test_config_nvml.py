"""GPUs as the driver shows them, from a driver that is not there."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from srt.config.facts import GpuFacts
from srt.config.nvml import Nvml, NvmlError
from srt.config.probe_gpu import cuda_of, probe_gpus, visible_order

UUIDS = ["GPU-aa11", "GPU-ab22", "GPU-cc33"]


class Driver:
    """What ctypes would have loaded. `codes`: functions that fail, and how; `missing`: it lacks them."""

    def __init__(
        self, uuids: list[str], codes: dict[str, int] | None = None, missing: tuple[str, ...] = ()
    ) -> None:
        self._uuids, self._codes, self._missing = uuids, codes or {}, missing
        self.called: list[str] = []

    def __getitem__(self, name: str) -> Any:
        if name in self._missing:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.called.append(name)
            if name in self._codes:
                return self._codes[name]
            self._answer(name, *arguments)
            return 0

        return call

    def _answer(self, name: str, *arguments: Any) -> None:
        match name:
            case "nvmlInit_v2" | "nvmlShutdown":
                assert not arguments
            case "nvmlSystemGetDriverVersion":
                self._write(arguments[0], arguments[1], "580.65.06")
            case "nvmlDeviceGetCount_v2":
                arguments[0]._obj.value = len(self._uuids)
            case "nvmlDeviceGetHandleByIndex_v2":
                arguments[1]._obj.value = 1000 + arguments[0].value
            case "nvmlDeviceGetName":
                self._write(arguments[1], arguments[2], f"card {self._index(arguments[0])}")
            case "nvmlDeviceGetUUID":
                self._write(arguments[1], arguments[2], self._uuids[self._index(arguments[0])])
            case "nvmlDeviceGetCudaComputeCapability":
                arguments[1]._obj.value, arguments[2]._obj.value = 9, self._index(arguments[0])
            case "nvmlDeviceGetMemoryInfo":
                memory = arguments[1]._obj
                memory.total, memory.free, memory.used = 1000, 900 - self._index(arguments[0]), 7
            case _:
                raise AssertionError(name)

    def _index(self, handle: ctypes.c_void_p) -> int:
        assert handle.value is not None
        return handle.value - 1000

    def _write(self, buffer: Any, size: ctypes.c_uint, text: str) -> None:
        assert ctypes.sizeof(buffer) == size.value
        buffer.value = text.encode()


def probe(driver: Driver, visible: str | None = None) -> tuple[list[GpuFacts], str]:
    return probe_gpus(visible, lambda: Nvml(lambda name: driver))


def test_every_card_with_its_facts() -> None:
    driver = Driver(UUIDS)
    gpus, trouble = probe(driver)
    assert trouble == ""
    assert gpus[1] == GpuFacts(
        index=1,
        name="card 1",
        capability=91,
        memory_total=1000,
        memory_free=899,
        driver="580.65.06",
    )
    assert [gpu.index for gpu in gpus] == [0, 1, 2]
    assert driver.called[-1] == "nvmlShutdown"


@pytest.mark.parametrize(
    ("visible", "order"),
    [
        ("2,0", [2, 0]),
        (" 1 , 2", [1, 2]),
        ("1,7,2", [1]),
        ("1,1", [1]),
        ("-1", []),
        ("", []),
        ("NoDevFiles", []),
        ("GPU-cc,GPU-aa11", [2, 0]),
        ("GPU-a", []),
        ("0,GPU-ab", [0, 1]),
    ],
)
def test_hidden_cards_are_not_there(visible: str, order: list[int]) -> None:
    assert visible_order(visible, UUIDS) == order
    gpus, trouble = probe(Driver(UUIDS), visible)
    assert [(gpu.index, gpu.name) for gpu in gpus] == [
        (index, f"card {position}") for index, position in enumerate(order)
    ]
    assert trouble == (
        "" if order else f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU of this machine (3)"
    )


@pytest.mark.parametrize(
    ("driver", "words"),
    [
        (Driver([]), "knows no GPU"),
        (Driver(UUIDS, {"nvmlInit_v2": 9}), "driver is not loaded"),
        (Driver(UUIDS, {"nvmlInit_v2": 18}), "differ in version"),
        (Driver(UUIDS, {"nvmlInit_v2": 4}), "may not ask"),
        (Driver(UUIDS, {"nvmlDeviceGetMemoryInfo": 15}), "fallen off the bus"),
        (Driver(UUIDS, {"nvmlDeviceGetName": 999}), "GetName of the NVIDIA driver failed (999)"),
        (Driver(UUIDS, missing=("nvmlDeviceGetCount_v2",)), "has no nvmlDeviceGetCount_v2"),
    ],
)  # fmt: skip
def test_trouble_in_words(driver: Driver, words: str) -> None:
    gpus, trouble = probe(driver)
    assert gpus == [] and words in trouble


def test_no_driver_installed() -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    with pytest.raises(NvmlError, match=r"no NVIDIA driver \(libnvidia-ml.so.1 is not installed\)"):
        Nvml(missing)
    assert probe_gpus(None, lambda: Nvml(missing))[0] == []


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: str = '1'\n", "13.0"),
        ("__version__ = '2.11.0+cpu'\ncuda: Optional[str] = None\n", ""),
        ('cuda = "12.8"\n', "12.8"),
        ("", ""),
    ],
)  # fmt: skip
def test_cuda_of_a_torch_that_is_not_imported(text: str, version: str) -> None:
    assert cuda_of(text) == version


def test_the_structure_is_as_the_driver_fills_it() -> None:
    """Three unsigned 64-bit numbers, in the order of nvml.h."""
    from srt.config.nvml import Memory

    raw = bytes(Memory(total=1, free=2, used=3))
    assert raw == b"".join(number.to_bytes(8, "little") for number in (1, 2, 3))
