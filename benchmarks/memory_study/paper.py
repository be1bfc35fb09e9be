"""The paper's figures, to be shown beside ours: from its text where no figure is named."""

USEFUL_MEMORY = {
    "Orca (Max)": 0.204,
    "Orca (Pow2)": 0.268,
    "Orca (Oracle)": 0.382,
    "Octavo": 0.963,  # vLLM
}
"""Share of KV memory that holds tokens: figure 2, from the experiment of section 6.2."""

SHAREGPT_SPEEDUP = {"Orca (Max)": "2.7-8x", "Orca (Oracle)": "1.7-2.7x"}
"""vLLM's request rate over theirs at similar latencies, on ShareGPT: section 6.2."""

SHARING = {"ShareGPT": "16.2-30.5%", "Alpaca": "6.1-9.8%"}
"""Blocks saved by parallel sampling: section 6.3, where figure 15 has 2, 4 and 6 outputs."""

BEAM_SHARING = {"ShareGPT": "44.3-66.3%", "Alpaca": "37.6-55.2%"}
"""Blocks saved by beam search: section 6.3, where figure 15 has widths 2, 4 and 6."""

PREFIX_SPEEDUP = {"Translation, 1 shot": "1.67x", "Translation, 5 shots": "3.58x"}
"""vLLM's throughput over Orca (Oracle)'s, with the prefix shared: section 6.4."""

LATENCY_BOUND = 0.2
"""Seconds per output token within which rates are compared. The bound is ours: the paper
compares at "similar latencies" (section 6.2) and names none."""
