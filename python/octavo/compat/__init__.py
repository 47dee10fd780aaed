# SPDX-License-Identifier: Apache-2.0
"""Fronts with the names and arguments of other libraries, so that a program changes one import.

    octavo.compat.flash_attn             as flash_attn (FlashAttention 2), and options of 3
    octavo.compat.flash_attn_interface   as flash_attn_interface (FlashAttention 3)
    octavo.compat.flashinfer             as flashinfer
    octavo.compat.transformer_engine     as transformer_engine.pytorch, for inference

They take PyTorch tensors, NumPy arrays and, where nothing is written in place, JAX arrays, and
answer in the framework they were asked in. What a front does not cover raises NotImplementedError
that names it; a name of the library that a front has not is no attribute of it, so that hasattr
and `from ... import ...` tell programs which ask. None of the libraries is needed, nor is PyTorch.
"""
