"""The kernels inside models of other libraries. Each module needs the library it is named after."""
