"""Softmax loss for several captions per image, and for hard-negative captions.

In: image features [b, D] and text features [t b, D] of this rank. The t texts of an image are adjacent: K captions,
then t - K hard negatives. Out: the loss; backward gives the gradients. With g = global image, h = global text:

    logits = scale * all_images @ all_texts.T                                  # never formed
    images: mean over g of lse_h(logits[g]) - mean over its K captions of logits[g, h]
    texts:  mean over captions h of lse_g(logits[:, h]) - logits[its image, h]
    loss = (images + texts) / 2

Hard negatives enter only the images' softmax. With K = 1 and no hard negatives the loss equals `inf_cl_loss`. Images
with equal ids are masked, or are additional positives in both directions (loss/duplicates). So is a hard negative with
the id of an image, for this image.
Cost: two passes of `info_nce_loss`: matmuls of b x t b and K b x b, and one pass around the ring for each.
Source: SupCon, arXiv 2004.11362, Eq. 2 (several positives); NegCLIP, arXiv 2210.01936 (hard-negative captions).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from infcl.loss.info_nce import info_nce_loss
from infcl.loss.inputs import DEFAULT_OPTIONS, RingOptions


def captions_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    *,
    captions: int = 1,
    group: dist.ProcessGroup | None = None,
    ids: Tensor | None = None,
    duplicates: str = "negative",
    margin: float | None = None,
    options: RingOptions = DEFAULT_OPTIONS,
) -> Tensor:
    """Compute the loss of the module docstring.

    Args:
        image_features, text_features: [b, D] and [t b, D]; the texts of an image are adjacent, its captions first.
        logit_scale, group, options: as in `info_nce_loss`.
        captions: K, at most t.
        ids: int64 [b], at least 0, equal for equal images; or [b, 1 + t - K] with the ids of the hard negatives.
            Without these a hard negative has an id of its own.
        duplicates: role of captions and images of other samples with an equal id; "mask" needs K = 1.
        margin: as in `inf_cl_loss`; the match of an image is its first caption.

    Returns:
        The loss, 0-dim, float32 or wider.

    Raises:
        ValueError: the number of texts is not t per image with t >= K, or ids are missing or misshapen.
    """
    images, device = len(image_features), image_features.device
    each, rest = divmod(len(text_features), max(1, images))
    if rest or not 1 <= captions <= each:
        raise ValueError(f"{len(text_features)} texts are not {captions} or more of each of {images} images")
    if captions > 1 and duplicates == "mask":
        raise ValueError(f"duplicates='mask' leaves out all but one of the {captions} captions of an image")
    shapes = (images,), (images, 1 + each - captions)
    if duplicates != "negative" and (ids is None or ids.shape not in shapes):
        raise ValueError(f"duplicates={duplicates!r} needs ids [{images}]")
    texts = text_features.unflatten(0, (images, each))
    own, negatives = texts[:, :captions].flatten(0, 1), texts[:, captions:].flatten(0, 1)
    number = torch.arange(images, device=device) + images * (0 if group is None else dist.get_rank(group))
    given = number if ids is None or duplicates == "negative" else ids.to(device)
    of_images, of_negatives = given.view(images, -1)[:, 0], given.view(images, -1)[:, 1:].flatten()
    if not len(of_negatives):  # unique ids
        of_negatives = -1 - torch.arange(len(negatives), device=device) - len(negatives) * number[:1]
    of_texts = torch.cat([of_images.repeat_interleave(captions), of_negatives])
    first = torch.arange(images, device=device)
    of_both: Any = {"margin": margin, "group": group, "options": options}
    image_loss = info_nce_loss(
        image_features, torch.cat([own, negatives]), first * captions, logit_scale,
        document_ids=of_texts, duplicates="positive" if captions > 1 else duplicates, **of_both,
    )  # fmt: skip
    caption_loss = info_nce_loss(
        own, image_features, first.repeat_interleave(captions), logit_scale,
        document_ids=of_images, duplicates=duplicates, **of_both,
    )  # fmt: skip
    return (image_loss + caption_loss) / 2
