"""The empty preparation: the checkpoint's weights as they are.

A preparation is a module of this folder with some of the hooks, and the constants, that kvgate.prepare.preparation
declares.
"""
