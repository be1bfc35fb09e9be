"""The PagedAttention paper's claims about memory, on Octavo's own scheduler.

One synthetic trace goes through Octavo's scheduler and KV-cache manager, and
through contiguous allocators as the paper describes them, with as much memory.

    python -m benchmarks.memory_study [--seed N] [--output FOLDER]

The paper: "Efficient Memory Management for Large Language Model Serving with
PagedAttention", Kwon et al., SOSP 2023; sections and figures below are its.

Files: `traces` (requests and arrivals), `cost` (seconds of a step), `buddy` and `contiguous` (the
baselines), `paged` (Octavo), `beams` (how its beams fork), `measure` (what is counted), `study`
(the runs for each claim), `paper` (its figures), `report` (the page).
"""
