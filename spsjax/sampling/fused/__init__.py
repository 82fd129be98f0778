"""Kernels of `to_probs` and `draw`, in Pallas for Triton.

A program has a share of a row's vocabulary. Where it needs sums or a maximum over the whole row,
the kernel before it has left those of each share, and the program combines them itself: starting
another kernel takes longer. Plain XLA code combines the last ones of a search.

`sampling.probs` and `sampling.drawing` have the specification in plain XLA.
`spsjax.utils.kernel_choice` says whether kernels are used. Arrays have R rows, of P shares each.
"""
