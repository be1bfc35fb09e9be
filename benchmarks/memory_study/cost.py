"""What a step takes: the longer of moving its bytes and doing its arithmetic.

The paper's smallest setting (section 6.1, table 1): OPT-13B in 16-bit floats on
one A100 of 40 GB, with 12 GB for the KV cache, which it counts as 15.7k slots of
800 KB.

- memory: every weight once (26 GB), and each sequence's K/V once a step;
- arithmetic: two operations for each weight and token; attention's own are
  left out, being few at these lengths.

An A100 moves 1,555 GB/s and does 312 Tflop/s at most (NVIDIA's data sheet); 80%
and 50% of that are taken as what programs reach. Paged K/V is charged 25% more
time than contiguous K/V: the paper measured 20-26% for its first kernel
(section 7.1), and newer ones lose less. Swapping goes over PCIe 4.0 x16 at 25
GB/s, before the step. No other overhead is counted for anyone, so absolute
rates come out above the paper's; it is ratios that are to be read.
"""

PARAMETERS = 13e9
SLOT_BYTES = 2 * 2 * 5120 * 40  # key and value, 2 bytes, hidden size, layers: 800 KiB
NUM_SLOTS = 12 * 2**30 // SLOT_BYTES  # 15,728
MODEL_LENGTH = 2048

BANDWIDTH = 0.8 * 1555e9
OPERATIONS = 0.5 * 312e12
LINK = 25e9
PAGED_READ = 1.25
SWAP_BYTES = 4 * 2**30

MAX_NUM_SEQS = 1024
"""High enough that memory, and never this, limits every system's batch."""

MAX_NUM_BATCHED_TOKENS = 2048

SECONDS_PER_TOKEN = 2 * PARAMETERS / OPERATIONS


def transfer_seconds(slots: int) -> float:
    """Time to copy that many slots between the GPU and the host."""
    return slots * SLOT_BYTES / LINK


def step_seconds(*, tokens: int, context: float) -> float:
    """Time of one step.

    Args:
        tokens: how many are computed.
        context: slots whose K/V is read.
    """
    memory = (2 * PARAMETERS + context * SLOT_BYTES) / BANDWIDTH
    return max(memory, tokens * SECONDS_PER_TOKEN)
