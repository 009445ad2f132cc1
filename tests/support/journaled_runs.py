"""A run with checkpoints and a journal whose records have real heads and no gradients: for everything but replay."""

from __future__ import annotations

import numpy as np

import ckstore
from ckstore._testing import repository_of
from ckstore.store.journal_needs import require_keyframe
from ckstore.store.journals import structures_of
from ckstore.store.points import find_point, points_by_keyframe
from support.journals import append, journals_on


class JournaledRun:
    """Writes checkpoints and points as a trainer does."""

    def __init__(self, place):
        self.store = ckstore.open(place)
        self.repository = repository_of(self.store)
        self.repository.make_folders()
        self.journals = journals_on(self.repository.manifests)
        self.writer = None
        self.structure = None

    def commit(self, step):
        """Commit a checkpoint that has no record; return its seq."""
        return self.store.commit({"x": np.full(8, float(step))}, step).seq

    def start(self, previous=None):
        """Begin a segment, and end the one before."""
        self.stop()
        self.writer = self.journals.open_writer(previous=previous)
        return self.writer.name

    def stop(self):
        if self.writer is not None:
            self.writer.close()

    def keyframe(self, step):
        """Commit a checkpoint that has a record; return its seq."""
        seq = self.commit(step)
        if self.structure is None:
            entry = next(info for info in self.store.log() if info.seq == seq)
            self.structure = structures_of(self.repository.manifests)(entry)
        self.points(step)
        return seq

    def points(self, *steps):
        """Append a record for each step; return the place of the last."""
        for step in steps:
            append(self.writer, step, structure=self.structure)
        return self.writer.last

    def segment(self, *steps, previous=None):
        """Write a segment that begins with a keyframe; return its name and the place of its last record."""
        name = self.start(previous)
        self.keyframe(steps[0])
        last = self.points(*steps[1:])
        self.stop()
        return name, last

    def segments(self):
        return self.journals.names()

    def place_of(self, step):
        """Return the record that a restore of this step takes."""
        return find_point(self.repository, step).record.place

    def found(self):
        """Return the steps of the points that a restore finds, by the seq of their keyframe."""
        found = points_by_keyframe(self.repository)
        return {seq: [point.step for point in points] for seq, points in found.items()}

    def continue_from(self, place):
        """Continue a record as another process does."""
        self.start(place)
        require_keyframe(self.repository, self.writer)
