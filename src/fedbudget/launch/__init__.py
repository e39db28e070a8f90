"""From settings to a run: each part is built in one function.

inputs.py loads data and model, method.py builds method, aggregator and meters, task.py
agrees on a task with remote nodes. simulate.py, serve.py, local.py and flower.py prepare a
run on their engine, join.py is a node, and execute.py runs a prepared run and writes it.
"""
