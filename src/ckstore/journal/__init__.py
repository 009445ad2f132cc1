"""The gradient journal: points between exact checkpoints, stored as the gradients that lead to them.

A first-order optimizer's next state follows from its state and the gradient. A point is the gradients and
hyper-parameters of the steps since the point before, and the small rest of the state.
"""
