"""The torch and Triton backends, which have the same functions, and the code that they share."""

# Namespace of our torch.library operators. The kernels hub imports a copy of this package under another name, next to
# the installed one.
NAMESPACE = __name__.partition(".")[0]
