"""Samples what one process holds, from its start to its end.

Host memory: resident set, its part that maps files, and the kernel's high-water mark (Linux), which no sample can miss.
NVIDIA GPUs: what the process holds and what each whole device holds, through NVML. The two are different figures and
are kept apart.
"""

import contextlib
import re
import threading
import time
from pathlib import Path
from typing import Any

import psutil

MAX_KEPT = 200


class MemorySampler:
    """Samples process `pid` every interval_s in a thread, until stop(). All figures are bytes."""

    def __init__(self, pid: int, gpus: "Gpus | None" = None, interval_s: float = 0.02) -> None:
        self.gpus = gpus
        self.interval_s = interval_s
        self.rss_peak: int | None = None
        self.rss_sampled_peak: int | None = None
        self.rss_anon_peak: int | None = None
        self.rss_file_peak: int | None = None
        self.gpu_process_peak: int | None = None
        self.gpu_device_peak = list(gpus.before) if gpus else None
        self.samples: list[tuple[float, int]] = []
        self._pid = pid
        self._process = psutil.Process(pid)
        self._start = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """One last sample, then no more."""
        self._stop.set()
        self._thread.join()
        self.sample()

    def _run(self) -> None:
        while not self._stop.wait(self.interval_s):
            self.sample()

    def sample(self) -> None:
        rss = self._sample_host()
        if self.gpus and self.gpu_device_peak is not None:
            held = self.gpus.held_by(self._pid)
            self.gpu_process_peak = _most(self.gpu_process_peak, held)
            self.gpu_device_peak = [max(a, b) for a, b in zip(self.gpu_device_peak, self.gpus.used())]
            rss = held if held is not None else rss
        if rss is not None:
            self.samples.append((round(time.monotonic() - self._start, 3), rss))

    def _sample_host(self) -> int | None:
        """Resident bytes, or None once the process is gone."""
        try:
            text = Path(f"/proc/{self._pid}/status").read_text()
            now = {
                name: int(kib) * 1024
                for name, kib in re.findall(r"^(VmRSS|VmHWM|RssAnon|RssFile):\s+(\d+) kB", text, re.MULTILINE)
            }
            if "VmRSS" not in now:  # a zombie
                return None
        except OSError:
            try:
                now = {"VmRSS": self._process.memory_info().rss}
            except psutil.Error:
                return None
        self.rss_sampled_peak = _most(self.rss_sampled_peak, now["VmRSS"])
        self.rss_peak = _most(self.rss_peak, now.get("VmHWM"))
        self.rss_anon_peak = _most(self.rss_anon_peak, now.get("RssAnon"))
        self.rss_file_peak = _most(self.rss_file_peak, now.get("RssFile"))
        return now["VmRSS"]

    def kept(self) -> list[tuple[float, int]]:
        """At most MAX_KEPT samples: the largest of each stretch, so that the peak is among them."""
        step = -(-len(self.samples) // MAX_KEPT) or 1
        return [
            max(self.samples[i : i + step], key=lambda sample: sample[1]) for i in range(0, len(self.samples), step)
        ]


class Gpus:
    """The NVIDIA GPUs of this machine, through NVML."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        self.before = self.used()

    def used(self) -> list[int]:
        return [self._nvml.nvmlDeviceGetMemoryInfo(handle).used for handle in self._handles]

    def held_by(self, pid: int) -> int | None:
        """Bytes that the process holds on all devices, or None where NVML does not tell (containers, some drivers)."""
        total = None
        for handle in self._handles:
            with contextlib.suppress(self._nvml.NVMLError):
                for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                    if process.pid == pid and process.usedGpuMemory is not None:
                        total = (total or 0) + process.usedGpuMemory
        return total

    def describe(self) -> tuple[list[dict[str, Any]], str]:
        """[{"name", "memory_bytes"}] and the driver's version."""

        def text(value: str | bytes) -> str:
            return value.decode() if isinstance(value, bytes) else value

        devices = [
            {
                "name": text(self._nvml.nvmlDeviceGetName(handle)),
                "memory_bytes": self._nvml.nvmlDeviceGetMemoryInfo(handle).total,
            }
            for handle in self._handles
        ]
        return devices, text(self._nvml.nvmlSystemGetDriverVersion())


def gpus() -> Gpus | None:
    """The NVIDIA GPUs, or None without any."""
    try:
        import pynvml

        pynvml.nvmlInit()
        found = Gpus(pynvml)
    except Exception:  # no driver, no library, no device: NVML has an error class for each
        return None
    return found if found.before else None


def _most(old: int | None, new: int | None) -> int | None:
    return new if old is None else old if new is None else max(old, new)
