"""Small trained models for sage-processors: three pipelines, a language model, a picture classifier.

Contains only data, which `sage_processors.pipelines` finds.
"""
