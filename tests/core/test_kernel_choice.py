"""`--kernels`: what runs in an operation, and what is refused when it is not there."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.config.problems import ConfigError
from megatron.core import parallel_state
from megatron.core.comm_group import CommGroup
from megatron.core.kernels import extension
from megatron.core.kernels.adam import AdamHyperParameters, HyperSpan, HyperSpans, adamw_reference_
from megatron.core.kernels.apex import adamw_by_apex_, apex_obstacle, norm_by_apex
from megatron.core.kernels.choice import (
    OPERATION_OF,
    OPERATIONS,
    DeviceType,
    KernelChoice,
    kernel_choice,
    set_kernel_choice,
)
from megatron.core.kernels.dispatch import compiled_for
from megatron.core.kernels.extension import (
    compiled_function,
    describe_kernels,
    implementation,
    kernel_problems,
    runs_in_apex,
)
from megatron.core.tensor_parallel.async_linear import parallel_linear
from megatron.training.initialize import _kernel_choice, initialize_megatron
from tests.helpers.numerics import assert_bitwise, assert_parity
from tests.helpers.tiny import TINY_GPT, tiny_config

CPU: DeviceType = "cpu"
CUDA: DeviceType = "cuda"
ADAM = OPERATION_OF["adamw_cpu"]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    extension.load_extension.cache_clear()
    extension._report_reference.cache_clear()
    yield
    set_kernel_choice(KernelChoice())
    extension.load_extension.cache_clear()
    extension._report_reference.cache_clear()


def build(monkeypatch: pytest.MonkeyPatch, **attributes: Any) -> None:
    """Have a compiled module with all functions that the operations call on CPUs, and these."""
    module = ModuleType("built")
    functions = {name: name for operation in OPERATIONS for name in operation.functions("cpu")}
    vars(module).update(functions | attributes)
    monkeypatch.setattr(extension, "load_extension", lambda: module)


def build_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "load_extension", lambda: None)


def choose(kernels: Any, device: DeviceType = CPU, **references: str) -> None:
    assert list(kernel_problems(kernels, device)) == []
    set_kernel_choice(KernelChoice(kernels=kernels, references=references))


def refusal(kernels: Any, device: DeviceType = CPU) -> str:
    (problem,) = kernel_problems(kernels, device)
    return str(problem)


# ---- the table ----


def test_every_function_of_the_compiled_module_belongs_to_an_operation() -> None:
    module = extension.load_extension()
    assert module is not None, "the compiled module is not built: `make kernels`"
    functions = {name for name, value in vars(module).items() if callable(value) and not name.startswith("_")}
    assert functions - set(OPERATION_OF) == {"instruction_sets"}
    on_cpus = {name for operation in OPERATIONS for name in operation.cpu}
    assert on_cpus - functions == set()


def test_no_two_operations_share_a_name_or_a_function() -> None:
    assert len({operation.name for operation in OPERATIONS}) == len(OPERATIONS)
    assert len(OPERATION_OF) == sum(len(set(operation.cpu + operation.cuda)) for operation in OPERATIONS)


# ---- what runs ----


def test_auto_takes_the_compiled_functions_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel_choice().kernels == "auto"
    build(monkeypatch, cuda=False)
    assert compiled_function("adamw_cpu", reference_cost="time") == "adamw_cpu"
    assert implementation(ADAM, "cuda").name == "torch"
    assert "without nvcc" in implementation(ADAM, "cuda").why
    build(monkeypatch, cuda=True, adamw_cuda="adamw_cuda")
    assert compiled_function("adamw_cuda", reference_cost="time", device="cuda") == "adamw_cuda"


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_torch_calls_nothing_that_is_compiled_and_says_nothing_of_it(
    device: DeviceType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build(monkeypatch, cuda=True)
    choose("torch", device)
    assert [name for name in OPERATION_OF if compiled_function(name, reference_cost="") is not None] == []
    assert describe_kernels(device).startswith("torch: adam, ")
    assert ";" not in describe_kernels(device)
    assert caplog.records == []


def test_a_flag_can_ask_for_the_reference_of_one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    build(monkeypatch)
    choose("native", **{"gradient norm": "--no-such-fusion"})
    assert compiled_function("sum_of_squares_cpu", reference_cost="") is None
    assert compiled_function("adamw_cpu", reference_cost="") is not None
    assert implementation(OPERATION_OF["sum_of_squares_cpu"], "cpu").why == "--no-such-fusion asks for it"


def test_what_runs_on_the_host_is_not_asked_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    build(monkeypatch, cuda=False)
    assert implementation(OPERATION_OF["build_blend_index"], "cuda").name == "native"


def test_the_flags_of_a_run_choose_its_kernels() -> None:
    assert _kernel_choice(tiny_config().training) == KernelChoice()
    assert _kernel_choice(tiny_config("--kernels", "native").training) == KernelChoice(kernels="native")
    unfused = ("--no-bias-swiglu-fusion", "--no-gradient-accumulation-fusion")
    assert _kernel_choice(tiny_config(*unfused).training) == KernelChoice(
        references={"swiglu": "--no-bias-swiglu-fusion"}, weight_gradients_apart=True
    )


def test_a_reference_is_that_of_an_operation() -> None:
    with pytest.raises(AssertionError, match=r"no operations \['soup'\]"):
        KernelChoice(references={"soup": "--no-soup"})


def test_a_run_is_refused_before_it_has_groups() -> None:
    for arguments in ([*TINY_GPT, "--kernels", "apex"], tiny_config("--kernels", "apex")):
        with pytest.raises(ConfigError, match="--kernels apex: the kernels of NVIDIA Apex run on GPUs"):
            initialize_megatron(arguments)
    with pytest.raises(RuntimeError, match="model parallel groups do not exist"):
        parallel_state.get_parallel_state()


def test_what_the_machine_lacks_is_reported_with_all_else_that_is_wrong() -> None:
    with pytest.raises(ConfigError) as caught:
        initialize_megatron([*TINY_GPT, "--lr", "0", "--kernels", "apex", "--distributed-backend", "nccl"])
    flags = [problem.flags[0] for problem in caught.value.problems]
    assert flags == ["--lr", "--distributed-backend", "--kernels"]
    wrong = tiny_config("--kernels", "apex")
    wrong = replace(wrong, optimizer=replace(wrong.optimizer, lr=0.0))
    with pytest.raises(ConfigError, match="2 problems in the configuration"):
        initialize_megatron(wrong)


def test_a_configuration_is_printed_where_it_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        initialize_megatron([*TINY_GPT, "--kernels", "apex", "--print-config"])
    assert "kernels: apex" in capsys.readouterr().out


class Products(TorchDispatchMode):
    """The products that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in function.__name__:
            self.names.append(function.__name__.partition(".")[0])
        return function(*args, **(kwargs or {}))


def test_a_weight_gradient_can_be_computed_apart_from_its_sum() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 2))
    sums = []
    for apart, product in ((False, "addmm_"), (True, "mm")):
        set_kernel_choice(KernelChoice(weight_gradients_apart=apart))
        weight.main_grad = torch.ones(3, 2)  # type: ignore[attr-defined]
        y = parallel_linear(
            torch.ones(5, 1, 2),
            weight,
            None,
            group=CommGroup.single("tensor"),
            sequence_parallel=False,
            input_gradient_reduce=False,
        )
        with Products() as products:
            y.sum().backward()
        assert products.names == [product]
        sums.append(weight.main_grad)  # type: ignore[attr-defined]
    assert_bitwise(sums[0], torch.full((3, 2), 6.0))
    assert_bitwise(sums[1], sums[0])


def test_a_kernel_on_a_gpu_leaves_the_current_device_of_torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel makes the device of its tensors current, in the runtime that torch has, too."""
    events: list[Any] = []

    @contextmanager
    def device(index: torch.device) -> Iterator[None]:
        events.append(("enter", index.index))
        yield
        events.append(("leave", index.index))

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    for operation in OPERATIONS:
        for name in operation.cuda:
            build(monkeypatch, cuda=True, **{name: lambda **arguments: events.append(arguments)})
            if name == "sum_of_squares_scratch":  # which runs on the host
                continue
            x = cast(Tensor, SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1)))
            launch = compiled_for(name.removesuffix("_cuda"), x, reference_cost="")
            assert launch is not None
            launch(rows=3)
            assert events == [("enter", 1), {"rows": 3, "device": 1, "stream": 7}, ("leave", 1)]
            events.clear()


def test_a_model_with_layer_norm_does_not_say_that_its_norm_has_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    build(monkeypatch)
    assert describe_kernels(CPU).startswith("native: adam, gradient norm, cross entropy, RMSNorm, ")


# ---- native ----


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_native_without_the_module_is_refused_with_the_command_that_builds_it(
    device: DeviceType, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_nothing(monkeypatch)
    text = refusal("native", device)
    assert re.search(r"--kernels native: .*is not built\n *Works: `make kernels` \(or `pip install \.`\)", text)


def test_native_on_a_gpu_needs_a_module_that_nvcc_has_built(monkeypatch: pytest.MonkeyPatch) -> None:
    build(monkeypatch, cuda=False)
    choose("native")
    assert re.search(r"was built without nvcc\n.* with nvcc in the PATH, builds it", refusal("native", CUDA))
    on_gpus = {name: name for operation in OPERATIONS for name in operation.cuda}
    build(monkeypatch, cuda=True, **on_gpus)
    choose("native", CUDA)
    assert describe_kernels(CUDA).startswith("native: ")


def test_native_refuses_a_module_of_other_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "load_extension", lambda: ModuleType("old"))
    assert "built from other sources: it lacks adamw_cpu, " in refusal("native")


# ---- apex ----


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages, none of which may be imported to be recognised."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(site: Path, *files: str) -> None:
    for file in files:
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text("raise AssertionError('imported')\n")
    importlib.invalidate_caches()


def install_nvidia(site: Path) -> None:
    packages = ("multi_tensor_apply", "optimizers", "normalization")
    install(site, "apex/__init__.py", *(f"apex/{package}/__init__.py" for package in packages))


def test_apex_is_refused_where_it_is_not_installed() -> None:
    text = refusal("apex", CUDA)
    assert re.search(r"--kernels apex: NVIDIA Apex is not installed; .*\n *Works: --kernels auto", text)


def test_apex_is_refused_on_a_cpu(site: Path) -> None:
    install_nvidia(site)
    assert "run on GPUs, and this is a CPU" in refusal("apex")


def test_the_unrelated_package_of_the_same_name_is_named_and_not_imported(site: Path) -> None:
    install(site, "apex/__init__.py", "apex/models.py", "apex/lib/__init__.py")
    metadata = site / "apex-0.9.10.dev0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.9.10.dev0\nSummary: Pyramid toolkit\n")
    told = r"`apex` .*here \(0\.9\.10\.dev0: Pyramid toolkit\) is not NVIDIA's.*pip uninstall apex"
    assert re.search(told, refusal("apex", CUDA))


def test_a_module_of_that_name_without_metadata_is_not_nvidias_either(site: Path) -> None:
    install(site, "apex.py")
    assert "installed here is not NVIDIA's" in apex_obstacle()


def test_apex_without_its_compiled_part_is_refused(site: Path) -> None:
    install_nvidia(site)
    install(site, "amp_C.py")
    assert "without its compiled fused_layer_norm_cuda; build it again" in refusal("apex", CUDA)


def test_apex_takes_what_it_has_and_leaves_the_rest(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvidia(site)
    install(site, "amp_C.py", "fused_layer_norm_cuda.py")
    build(monkeypatch, cuda=True, sum_of_squares_cuda="sum_of_squares_cuda")
    choose("apex", CUDA)
    on_gpu, on_cpu = (cast(Tensor, SimpleNamespace(is_cuda=is_cuda)) for is_cuda in (True, False))
    for name in ("adamw_cuda", "rms_norm_cuda"):
        assert runs_in_apex(name, on_gpu)
        assert not runs_in_apex(name, on_cpu)
        assert compiled_function(name, reference_cost="", device="cuda") is None
    assert not runs_in_apex("sum_of_squares_cuda", on_gpu)
    assert compiled_function("sum_of_squares_cuda", reference_cost="", device="cuda") == "sum_of_squares_cuda"


def adam_of_apex(
    chunk: int,
    skip: Tensor,
    tensors: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decoupled: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """`amp_C.multi_tensor_adam` as its sources define it."""
    assert bias_correction == 1 and skip.dtype == torch.int32 and not skip
    for g, p, m, v in zip(*tensors):
        assert p.numel() <= 300, "longer than it can count"
        decay = weight_decay * p
        if not decoupled:
            g = g + decay
        m.copy_(beta1 * m + (1 - beta1) * g)
        v.copy_(beta2 * v + (1 - beta2) * g * g)
        update = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps)
        p.sub_(lr * (update + decay if decoupled else update))


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("gradient_scale", [1.0, 8.0])
def test_the_adam_of_apex_is_the_reference(
    gradient_scale: float, decoupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.core.kernels.apex._LONGEST", 300)
    spans = HyperSpans(
        [HyperSpan(length=640), HyperSpan(length=64, weight_decay_multiplier=0, lr_multiplier=2), HyperSpan(length=7)],
        torch.device("cpu"),
    )
    hyper = AdamHyperParameters(
        step=3,
        lr=0.01,
        weight_decay=0.1,
        beta1=0.9,
        beta2=0.99,
        eps=1e-6,
        gradient_scale=gradient_scale,
        decoupled=decoupled,
    )
    generator = torch.Generator().manual_seed(0)
    mine = [torch.rand(spans.size, generator=generator) for _ in range(4)]
    expected, low = [tensor.clone() for tensor in mine], torch.zeros(spans.size, dtype=torch.bfloat16)
    adamw_by_apex_(adam_of_apex, *mine, spans=spans, hyper=hyper, low_precision=low)
    adamw_reference_(*expected, spans=spans, hyper=hyper)
    for index, name in ((0, "parameter"), (2, "exp_avg"), (3, "exp_avg_sq")):
        assert_parity(mine[index], expected[index], name)
    assert torch.equal(low, mine[0].bfloat16())


def test_the_norms_of_apex_are_the_reference() -> None:
    """Called as its sources define them."""

    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, shape: torch.Size, eps: float = 1e-6) -> Tensor:
        return F.layer_norm(x, shape, weight, bias, eps)

    def rms_norm(x: Tensor, weight: Tensor, shape: torch.Size, eps: float = 1e-6) -> Tensor:
        return F.rms_norm(x, shape, weight, eps)

    apex = SimpleNamespace(fused_layer_norm_affine=layer_norm, fused_rms_norm_affine=rms_norm)
    x, weight, bias = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((5, 8), 8, 8))
    assert_bitwise(norm_by_apex(apex, x, weight, bias, 0.1), F.layer_norm(x, (8,), weight, bias, 0.1))
    assert_bitwise(norm_by_apex(apex, x, weight, None, 0.1), F.rms_norm(x, (8,), weight, 0.1))
