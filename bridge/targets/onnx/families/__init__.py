"""One module for each family of models that needs its own export.

A module is called like the folder of the family in transformers, and its `FAMILY` is a value of
`bridge.targets.onnx.export.family.Family`. It is imported when a graph of the family is exported, and needs torch.
`refusals` has what a config alone tells, `templates` the families whose graphs are templates.
"""
