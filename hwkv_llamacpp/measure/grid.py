"""A grid of measured cases, or a search for the largest context: each case is a row of a JSONL file. Memory and
throughput are two views of the same grid of cases: what one command has measured, the other only shows.

Arms: `upstream` is the unpatched llama-server of the same source and flags, `full` is ours with an all-full policy,
and each policy is an arm by its file's name. Arms are interleaved, in an order that rotates. A run that was stopped
goes on where it stopped.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from ..base import sizes
from ..base.names import as_text
from ..errors import HwkvError
from ..gguf.embed import read_policy
from ..gguf.geometry import ModelGeometry
from ..plan import dry_run
from ..plan.planner import Plan, Planner, largest_context
from ..policy.policy import Policy
from ..runtime import native
from . import boundary, machine, records, sampler
from .case import Arm, Settings, describe, full_policy, measure, on_gpu
from .rows import Kind, ServerRow, Step

MIB = 2**20
PROCESS_CTX = 2048  # context of the run that tells what the process holds beside its buffers
ARMS = ("upstream", "full", "policy")
RESULTS = ("ok", "out of memory")  # other ends say nothing of the case, and it is tried again


class Grid:
    """One command's arms, settings and rows. Everything that can be wrong is found before the first server starts."""

    def __init__(
        self,
        view: str,
        settings: Settings,
        arms: Sequence[str],
        policies: Sequence[Path],
        output: Path,
        logs: Path | None = None,
    ) -> None:
        """view: memory, throughput or capacity. arms: of ARMS. policies: paths, an arm each. output: the JSONL file.
        logs: folder that keeps the servers' logs."""
        self.view, self.settings, self.output, self.logs = view, settings, output, logs
        self.kind: Kind = "capacity" if view == "capacity" else "grid"
        if policies and "policy" not in arms:
            raise HwkvError(f"--policy {policies[0]} is given, but --arms has no policy")
        if self.logs:
            self._make_folder(self.logs)
        self.geometry = ModelGeometry.from_gguf(settings.model)
        self.planner = Planner(settings.model)
        # by arm: at the peak, and charged to a control group
        self._process_bytes: dict[Arm, int] = {}
        self._charged_bytes: dict[Arm, int] = {}
        self._on_gpu = False  # what the peak counts
        self.gpus = sampler.gpus()
        self._check_machine(settings.n_gpu_layers)
        self._folder = tempfile.TemporaryDirectory(prefix="hwkv-bench-")
        self.arms = self._make_arms(arms, policies)
        for arm in self.arms:
            native.binary("llama-server", arm.upstream)
        held = [row for row in records.read(self.output, missing_ok=True) if isinstance(row, ServerRow)]
        self.done = {row.key: row for row in held if row.status in RESULTS}
        other = sum(
            row.build_pair != machine.build_pair() or row.machine != machine.machine() for row in self.done.values()
        )
        if other:
            self._say(
                f"{self.output} holds {other} rows of another build or machine: they stay, and are compared with"
                " nothing new"
            )

    def _check_machine(self, n_gpu_layers: int | None) -> None:
        build, weights = native.build_dir().name, self.planner.header.weight_bytes or 0
        if n_gpu_layers and not native.has_gpu():
            raise HwkvError(
                f"-ngl {n_gpu_layers} asks for a GPU, and the build in use ({build}) has none: "
                "run ./build.sh --cuda or --vulkan."
            )
        if n_gpu_layers and build.startswith("cuda") and not self.gpus:
            raise HwkvError(f"-ngl {n_gpu_layers} asks for a GPU, and NVML finds none on this machine.")
        limit = self.settings.memory_limit_bytes
        if limit is not None and limit <= weights and not n_gpu_layers:
            raise HwkvError(
                f"--memory-limit is {sizes.show(limit)}, below the {weights / MIB:,.1f} MiB of the weights alone."
            )
        if self.kind == "capacity" and limit is None and not (self.gpus and n_gpu_layers):
            raise HwkvError(
                "on a CPU the capacity needs --memory-limit, such as 3GiB: without one the machine itself would run"
                " out."
            )

    def _make_arms(self, wanted: Sequence[str], paths: Sequence[Path]) -> list[Arm]:
        folder = Path(self._folder.name)
        policies: dict[str, tuple[Path, Policy]] = {}
        if "policy" in wanted:
            for path in paths:
                name = as_text(path.stem)
                if name in (*policies, *ARMS[:2]):
                    raise HwkvError(f"{path}: another arm is called {name!r} already: rename the file")
                policies[name] = (path, Policy.load(path))
            if not policies and (embedded := read_policy(self.settings.model)):
                path = folder / "embedded.json"
                embedded.save(path)
                policies["embedded"] = (path, embedded)
            if not policies:
                raise HwkvError(f"the arm 'policy' needs --policy: {self.settings.model} carries none")
        arms = []
        for name in wanted:
            if name == "upstream":
                arms.append(Arm(name, upstream=True))
            elif name == "full":
                path = folder / "full.json"
                full_policy(self.geometry).save(path)
                arms.append(Arm(name, path=path))
            else:
                for stem, (path, policy) in policies.items():
                    policy.check(self.geometry, path)
                    arms.append(Arm(stem, path=path.resolve(), policy=policy))
        return arms

    # the two shapes of a run

    def cases(self, contexts: Sequence[int], repetitions: int) -> list[ServerRow]:
        """Rows of all arms at these contexts, measured now or found in the file."""
        for n_ctx in contexts:
            self._check_context(n_ctx)
        cases = []
        for round_ in range(repetitions):
            for i, n_ctx in enumerate(contexts):
                turn = (round_ + i) % len(self.arms)
                cases += [(arm, n_ctx, round_) for arm in self.arms[turn:] + self.arms[:turn]]
        for arm in self.arms:
            self._measure_process(arm)
        n_missing = sum(n_ctx for arm, n_ctx, round_ in cases if self._asked(arm, n_ctx, round_).key not in self.done)
        rows = []
        with tqdm(total=n_missing, unit="tok", unit_scale=True, desc=self.view, disable=None) as progress:
            for arm, n_ctx, round_ in cases:
                is_new = self._asked(arm, n_ctx, round_).key not in self.done
                rows.append(self._case(arm, n_ctx, round_))
                progress.update(n_ctx if is_new else 0)
        return rows

    def capacity(self, grid: int, highest: int) -> None:
        searches, found, least = {}, {}, self.settings.n_predict + 1
        if -(-least // grid) > highest // grid:
            raise HwkvError(f"--highest is {highest}: no multiple of --grid {grid} from {least} up to it")
        for arm in self.arms:
            self._measure_process(arm)
            searches[arm] = boundary.scan(highest, self._guess(arm, grid, highest), grid, self.settings.n_predict + 1)
        waiting = {arm: next(search) for arm, search in searches.items()}
        while waiting:
            for arm in list(waiting):  # one case of each arm in turn
                n_ctx, step, round_ = waiting.pop(arm)
                row = self._case(arm, n_ctx, round_, step)
                try:
                    waiting[arm] = searches[arm].send(row.status)
                except StopIteration as end:
                    found[arm] = end.value
                    self._say(f"{arm.name}: {end.value.note}")
        open_ends = [f"{arm.name}: {pair.note}" for arm, pair in found.items() if not pair.confirmed]
        if open_ends:
            raise HwkvError(f"not every boundary is confirmed: {'; '.join(open_ends)}")

    def _guess(self, arm: Arm, grid: int, highest: int) -> int:
        """Context where the search starts: what the plan says, else the trained context."""
        self._check_context(-(-(self.settings.n_predict + 1) // grid) * grid)
        limit = self.settings.memory_limit_bytes or (
            self.gpus and max(gpu["memory_bytes"] for gpu in self.gpus.describe()[0])
        )
        if not self.planner.dry or not limit:
            return self.geometry.n_ctx_train
        found = largest_context(lambda n: self._plan(arm, n, self._charged_bytes.get(arm)), [limit], grid, highest)
        return found[0] if found else grid

    # one case

    def _asked(self, arm: Arm, n_ctx: int, round_: int, step: Step | None = None) -> ServerRow:
        """The row of a case before it is measured."""
        return describe(self.kind, arm, n_ctx, self.settings, self.geometry, round_, step)

    def _case(self, arm: Arm, n_ctx: int, round_: int, step: Step | None = None) -> ServerRow:
        """The row of a case: the one that is there, or a new one."""
        if row := self.done.get(self._asked(arm, n_ctx, round_, step).key):
            return row
        plan = self._plan(arm, n_ctx) if self.planner.dry else None
        log = None
        if self.logs:
            log = self.logs / f"{self.kind}-{arm.name}-{n_ctx}-{(step or 'round').replace(' ', '-')}-{round_}.log"
        row = measure(
            self.kind,
            arm,
            n_ctx,
            self.settings,
            self.geometry,
            round_=round_,
            step=step,
            gpus=self.gpus,
            plan=plan,
            log_path=log,
        )
        records.append(self.output, row)
        self.done[row.key] = row
        result = f"{row.status} in {row.phase}: {row.cause}"
        if row.status == "ok":
            assert row.peak_bytes is not None and row.kv_bytes is not None
            assert row.prefill_ts is not None and row.decode_ts is not None
            charged = (
                f"charged {row.limited_bytes / MIB:,.1f} of {row.memory_limit_bytes / MIB:,.1f} MiB, "
                if row.limited_bytes and row.memory_limit_bytes
                else ""
            )
            result = (
                f"{charged}peak {row.peak_bytes / MIB:,.1f} MiB, KV {row.kv_bytes / MIB:,.1f} MiB,"
                f" prefill {row.prefill_ts:,.1f} t/s, decode {row.decode_ts:,.2f} t/s"
            )
        what = (
            "warm-up, which tells what the process holds beside its buffers"
            if step == "process"
            else f"{step or 'round'} {round_ + 1}"
        )
        self._say(f"{arm.name}, -c {n_ctx}, {what}: {result}")
        return row

    def _measure_process(self, arm: Arm):
        """Libraries, vocabulary, graphs and allocator are in no dry run: one small case of each arm tells what they
        take. It is a row of its own and part of no result."""
        if not self.planner.dry:
            return
        least = self.settings.n_predict + 1
        row = self._case(arm, max(PROCESS_CTX, -(-least // 256) * 256), 0, "process")
        if row.status != "ok":
            return
        assert row.peak_bytes is not None
        plan = self._plan(arm, row.n_ctx, 0)
        self._on_gpu = on_gpu(row)
        buffers = plan.gpu_bytes if self._on_gpu else plan.total_bytes
        self._process_bytes[arm] = max(0, row.peak_bytes - buffers)
        # a control group is not charged for library pages that others have read before
        self._charged_bytes[arm] = max(0, (row.limited_bytes or row.peak_bytes) - buffers)

    def _plan(self, arm: Arm, n_ctx: int, process_bytes: int | None = None) -> Plan:
        s = self.settings
        context = dry_run.Context(
            str(s.model),
            str(arm.path) if arm.policy else "off",
            n_ctx,
            s.n_batch,
            s.n_ubatch,
            n_gpu_layers=s.n_gpu_layers,
            type_k=s.type_k,
            type_v=s.type_v,
        )
        if process_bytes is None:
            process_bytes = self._process_bytes.get(arm)
        return self.planner.plan(context, arm.policy, process_bytes, self._on_gpu)

    def _check_context(self, n_ctx: int) -> None:
        if n_ctx <= self.settings.n_predict:
            raise HwkvError(
                f"a context of {n_ctx} leaves no room for a prompt before {self.settings.n_predict} generated tokens"
            )
        if n_ctx > self.geometry.n_ctx_train:
            self._say(
                f"warning: a context of {n_ctx} is larger than the model was trained for ({self.geometry.n_ctx_train}):"
                " llama-server is told otherwise with --override-kv; memory and speed are right,"
                " the text that comes out is not"
            )

    @staticmethod
    def _make_folder(path: Path) -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HwkvError(f"{path}: cannot write: {error.strerror}") from None

    @staticmethod
    def _say(text: str) -> None:
        tqdm.write(text, file=sys.stderr)
