"""Which of torch's own kernels a run may use: deterministic ones, the precision of float32 products, attention's."""

import torch
from torch.backends import cuda

from bench.config.schema import HardwareConfig
from bench.machine import lazy_dynamo

SDPA = {  # hardware.sdpa: (how it is switched, how it is asked)
    "flash": (cuda.enable_flash_sdp, cuda.flash_sdp_enabled),
    "efficient": (cuda.enable_mem_efficient_sdp, cuda.mem_efficient_sdp_enabled),
    "cudnn": (cuda.enable_cudnn_sdp, cuda.cudnn_sdp_enabled),
    "math": (cuda.enable_math_sdp, cuda.math_sdp_enabled),
}


def choose(hardware: HardwareConfig) -> None:
    """Set what hardware asks for, for this process; null leaves torch's own choice."""
    if hardware.device == "cpu" and not hardware.compile:  # what is raced on GPUs is torch as it is
        lazy_dynamo.install()
        torch.set_deterministic_debug_mode("error" if hardware.deterministic else "default")
    else:
        torch.use_deterministic_algorithms(hardware.deterministic)  # imports the compiler, to tell it too
    if hardware.tf32 is not None:
        torch.set_float32_matmul_precision("high" if hardware.tf32 else "highest")
    if hardware.sdpa is not None:
        for name, (enable, _) in SDPA.items():
            enable(name == hardware.sdpa)


def facts() -> dict[str, str | list[str]]:
    """What is set in this process: run.json["measured"] has it, beside the backends that attention really took."""
    return {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),  # highest: float32; high: TF32 on a GPU
        "sdpa_enabled": [name for name, (_, enabled) in SDPA.items() if enabled()],
    }
