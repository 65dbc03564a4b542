"""Drafting with an MTP layer: Eagle's passes over pairs, and the target's head."""

from torch import Tensor

from ..eagle.generator import EagleCandidateGenerator


class MtpCandidateGenerator(EagleCandidateGenerator):
    """Drafting with an [`MtpDrafter`], which has the passes of an Eagle drafter, during one call."""

    def draft_logits(self, features: Tensor) -> Tensor:
        """Logits of the target's head, which is the layer's, too."""
        return self.target.head(features)
