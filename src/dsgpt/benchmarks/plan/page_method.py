"""The prose of ``docs/planner.md``: how the prediction is made, and how it is measured."""

METHOD = (
    (
        "The model",
        """A prediction is the largest of the moments of a step after the first. At each, what exists is added up:

* with ZeRO-3, **the end of the forward pass**: gathered weights, which exist twice while they are taken apart;
* **the loss**: all kept activations, the logits of a chunk of tokens, and the gradient of the head, which the fused
  loss computes at once;
* **the backward pass**: at its beginning the kept activations and the gradient of a block's widest layer;
* **the reduction of gradients**: at the end those of all blocks and of the embedding's lookup, which is dense; with
  ZeRO-2 and 3 and with FSDP earlier, whenever a bucket is full or a block is done, from a copy;
* **the optimizer's step**: gradients and their copies, as `planning/moments_pytorch.py`, `moments_zero.py` and
  `moments_zero3.py` describe for each strategy.

Model state comes from `planning/model_state.py`, which is exact. What a block keeps is counted in units of the residual
stream, u = tokens x width x bytes of a number: 1 for the output of each of two LayerNorms, 3 for queries, keys and
values, 1 for the attention's output, 1 for the residual sum after it, 4 for the inner layer of the MLP before GELU and
4 after, 1 for the block's output. That is **16u**, besides 4 bytes of statistics per token and head, and per token and
LayerNorm. Korthikanti et al. (arXiv 2205.05198, section 4.1) have 34 where this has 16, and a term that is quadratic in
the tokens. The 34 are bytes per element in 16-bit precision: 16 numbers of 2 bytes, the same as here, and 1 byte each
for two dropout masks, which do not exist without dropout. The quadratic term is that of the attention's scores, their
softmax and its mask, of which the fused attention keeps only one number per token and head.

With T tensor ranks the inner parts of attention and MLP, 12 of the 16, are divided by T. With sequence ranks the tokens
are divided, and the attention's output is kept before and after the all-to-all, 1u more. A pipeline stage keeps the
activations of as many micro batches as stages follow it, and its own. With activation checkpointing
a block keeps 1u, and one block at a time is computed again.

DeepSpeed allocates its reduce bucket at its full size before the first gradient comes. A run gives it the recipe's
`reduce_bucket_size`, at most the number of the model's parameters, and the prediction has the same number.""",
    ),
    (
        "The measurement",
        """Every cell is a training by the product's own code, in real processes. Its third step is recorded with
`torch.profiler`, which notes every allocation and release of a tensor from before the strategy is built; the peak is
the largest sum within the step. Memory that gloo frees in its own threads is invisible to the profiler, so each rank
waits 10 ms after each collective and frees it itself. On a CPU, offloaded state is in the same memory as everything
else, and the prediction for a CPU counts it; on a GPU it does not. PyTorch's `MemTracker` is a second witness in cells
of one process and one micro batch; it is told of the model state, and follows other tensors from the dispatcher. Step
times are measured in other processes, without a profiler, in rounds in which all cells take turns.

No GPU took part. What is assumed for one: the same tensors as here; chunks of the loss of 256 instead of 32 million
logits, with the softmax over a whole chunk; fused attention that keeps what the CPU's does. The allocator's rounding
and fragmentation, CUDA's context (about 0.5 GB), cuBLAS's workspaces and NCCL's buffers are not in the prediction.""",
    ),
)
