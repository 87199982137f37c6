"""Small trained models for sage-processors: a FLUX pipeline, a language model, a classifier of pictures. Data only.

`sage_processors.pipelines` finds them; nothing here imports anything.
"""
