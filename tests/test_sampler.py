"""Memory of GPUs as NVML tells it. A stand-in for the library, which is where a driver is, and no GPU has run these
tests."""

import os
from types import SimpleNamespace

from hwkv_llamacpp.measure import sampler

PID = os.getpid()


class Nvml:
    """Two devices. held: for each, [(pid, bytes)], or None where the driver does not tell."""

    class NVMLError(Exception):
        pass

    def __init__(self, used, held):
        self.used, self.held = used, held

    def nvmlDeviceGetCount(self):
        return len(self.used)

    def nvmlDeviceGetHandleByIndex(self, i):
        return i

    def nvmlDeviceGetMemoryInfo(self, i):
        return SimpleNamespace(used=self.used[i], total=1000)

    def nvmlDeviceGetComputeRunningProcesses(self, i):
        if self.held[i] is None:
            raise self.NVMLError
        return [SimpleNamespace(pid=pid, usedGpuMemory=n_bytes) for pid, n_bytes in self.held[i]]

    def nvmlDeviceGetName(self, i):
        return b"a GPU" if i == 0 else "another"  # older versions give bytes

    def nvmlSystemGetDriverVersion(self):
        return b"580.1"


def test_process_and_devices_are_kept_apart():
    nvml = Nvml([100, 40], [[(1, 70)], []])
    gpus = sampler.Gpus(nvml)
    assert gpus.describe() == (
        [{"name": "a GPU", "memory_bytes": 1000}, {"name": "another", "memory_bytes": 1000}],
        "580.1",
    )
    watch = sampler.MemorySampler(PID, gpus, interval_s=60)
    for used, ours in (([350, 90], (250, 50)), ([600, 60], (200, 20)), ([120, 40], (10, None))):
        nvml.used, nvml.held = used, [[(1, 70), (PID, ours[0])], [(PID, ours[1])]]
        watch.sample()
    watch.stop()
    assert gpus.before == [100, 40]
    assert watch.gpu_process_peak == 300  # of one moment, both devices together
    assert watch.gpu_device_peak == [600, 90]  # of each device, whoever holds it
    assert [held for _, held in watch.samples] == [300, 220, 10, 10]
    assert watch.rss_peak > 2**20  # the host's as well


def test_a_driver_that_tells_nothing_of_processes():
    """As in containers: then the device is all there is, and samples are of the host."""
    nvml = Nvml([100, 40], [None, [(PID, None)]])
    watch = sampler.MemorySampler(PID, sampler.Gpus(nvml), interval_s=60)
    watch.stop()
    assert watch.gpu_process_peak is None and watch.gpu_device_peak == [100, 40]
    assert watch.samples[0][1] > 2**20


def test_without_a_gpu_there_are_none(monkeypatch):
    import pynvml

    def no_driver():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    assert sampler.gpus() is None
