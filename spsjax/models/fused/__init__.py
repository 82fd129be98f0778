"""Operations of a decode step as one or two kernels each, for NVIDIA GPUs.

Plain XLA code elsewhere in `models` specifies each of them. A kernel gives the same results up to
rounding. `spsjax.utils.kernel_choice` says when kernels are used.
"""
