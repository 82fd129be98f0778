"""Kernels of `to_probs` and `draw`, in Pallas for Triton.

A program has a share of a row's vocabulary. Where it needs a sum or a maximum over the whole row,
the kernel before it has left one number per share, and the program combines these itself: starting
another kernel takes longer. `sampling.probs` and `sampling.drawing` have the specification in plain
XLA. `spsjax.utils.kernel_choice` says whether kernels are used.

Arrays have R rows, of P shares each.
"""
