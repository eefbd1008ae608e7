"""Train Mixture-of-Experts language models, from a laptop to a cluster.

An application over the four other packages: its modules are imported by name. Read them in the
order of the data: ``corpus``, ``data``, ``model`` (with ``attention`` and ``experts``),
``trainer``, ``run``.

Shapes are written as a suffix of the name, so ``x_BSD`` has three axes, B, S and D:

====  =======================================================
B     sequences of one microbatch
S     tokens of one sequence
T     tokens of one microbatch, B * S
V     vocabulary
D     width of the residual stream
H     attention heads
C     width of one attention head
L     blocks
E, K  experts; experts of each token
F     hidden width of one expert
====  =======================================================
"""
