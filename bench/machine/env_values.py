"""Values of environment variables as a record may show them: settings as they are, anything else as a hash.

    "expandable_segments:True,max_split_size_mb:128"  -> the same
    "expandable_segments:hunter2"                     -> "expandable_segments:#5a1c6e0f9b3d2c41"

A value is cut into words.  A word stays if it is a number, one of the words that CUDA, cuBLAS, NCCL, Gloo, PyTorch,
Triton, OpenMP, MKL, glibc and Hydra document as values or keys of their variables, a network interface, a library or a
folder that systems have.  Two values are equal where their shown texts are.
"""

import re

from bench.base import private

SERIAL = re.compile(r"(?:GPU|MIG)-[0-9a-f-]{8,}", re.I)
WORD = re.compile(r"[\w.+~#-]+")
NUMBER = re.compile(
    r"[-+]?(\d{1,10}(\.\d{1,10}){0,3}(e[-+]?\d{1,3})?|0x[0-9a-f]{1,8})([kmgt]i?b?|us|ms|s)?(-\d{1,4})?", re.I
)
NAMED = re.compile(
    r"\+?(lo|(eth|ib|bond|hsn|docker|veth|rdma|roce)\d{0,3}|en[ops]\d\w{0,10}|mlx\d_(bond_)?\d{1,2}"  # interfaces
    r"|lib(32|64)?|lib[a-z_]{2,24}(\.so)?[\d.]{0,9}|(cuda|cudnn|gcc|llvm|nccl|openmpi|python|rocm|ucx)-?\d[\d.]{0,9}"
    r"|(sm|compute)_\d{2,3}[af]?|\d{1,2}\.\d[af]?\+ptx|(GPU)?#[0-9a-f]{16})",  # the last: what is a hash already
    re.I,
)
SETTINGS = """
true false yes no on off auto default none null all any enable enabled disable disabled always never force debug
detail info warn warning error trace version verbose quiet silent critical fatal cpu cuda gpu cudnn cublas nccl gloo
torch pytorch triton mkl onednn openmp native static dynamic min max mean fast safe strict legacy full half medium
high highest low lowest single double real

backend cudamallocasync expandable_segments max_split_size_mb roundup_power2_divisions garbage_collection_threshold
roundup_bypass_threshold_mb max_non_split_rounding_mb release_lock_on_cudamalloc pinned_use_cuda_host_register
pinned_num_register_threads pinned_use_background_threads per_process_memory_fraction graph_capture_record_stack_reuse
dynamo inductor aot aot_graphs aot_joint_graph autograd ddp fsdp dist distributed graph graph_breaks graph_code
graph_sizes guards recompiles recompiles_verbose output_code kernel_code fusion schedule perf_hints bytecode sym_node
cudagraphs cudagraph_static_inputs post_grad_graphs onnx export tf32 ieee bf16 bfloat16 fp16 fp32 fp8 int8 eager ptx
aten cutlass ck cpp ftz

init coll p2p shm net tuning env alloc call proxy nvls bootstrap reg profile ras ring tree collnet collnetdirect
collnetchain nvlstree pat simple ll ll128 allreduce allgather reducescatter broadcast reduce sendrecv ib socket loc
nvl pix pxb phb sys ofi efa aws-ofi host hostname device bus ipv4 ipv6 af_inet af_inet6 roce

passive active close spread master primary threads cores sockets ll_caches numa_domains guided monotonic nonmonotonic
granularity fine core thread tile compact scatter balanced explicit respect norespect proclist warnings nowarnings
reset noreset duration infinite turnaround throughput serial intel gnu tbb sequential lp64 ilp64 sse2 ssse3 sse41
sse4_1 sse4_2 avx avx2 avx2_e1 avx2_vnni avx2_vnni_2 avx512 avx512_e1 avx512_e2 avx512_e3 avx512_e4 avx512_core
avx512_core_vnni avx512_core_bf16 avx512_core_fp16 avx512_core_amx avx512_core_amx_fp16 avx10_1_512 avx10_1_512_amx
avx10_1_512_amx_fp16 avx10_2_512 avx10_2_512_amx_2 vsx zvector sve128 sve256 compatible cbwr coa branch strict any_avx2
dispatch create

void compute utility graphics video display compat32 driver brand tesla grid geforce titan quadro nvidiartx vapps vpc
vcs vws cloudgaming requirements lazy fastest_first pci_bus_id product name image h100 h200 a100 b200 l40s v100

usr local opt lib bin share include etc var tmp run dev shm proc home root srv mnt data nvidia conda targets
x86_64-linux aarch64-linux x86_64-linux-gnu aarch64-linux-gnu stubs extras cupti lib.so site-packages dist-packages
miniconda3 anaconda3 cache torch_extensions torchinductor user stdout stderr . .. ~
"""  # of all; PYTORCH_ and TORCH; NCCL_ and GLOO_; OMP_, KMP_, MKL_ and ONEDNN_; NVIDIA_ and CUDA_; folders
WORDS = frozenset(SETTINGS.split())


def shown(value: str) -> str:
    """value -> the same with a # and 16 hex digits, salted, in place of each word that is not a known setting.

    What was shown once stays as it is.
    """
    value = SERIAL.sub(lambda serial: "GPU#" + private.salted_hash(serial[0]), value)
    return WORD.sub(lambda word: word[0] if _is_setting(word[0]) else "#" + private.salted_hash(word[0]), value)


def is_whole(value: str) -> bool:
    """Whether shown() left a recorded value as it was: only such a one can be set again."""
    return "#" not in value


def _is_setting(word):
    return word.lower().strip("+-") in WORDS or bool(NUMBER.fullmatch(word) or NAMED.fullmatch(word))
