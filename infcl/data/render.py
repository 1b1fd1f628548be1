"""The images of the demo data set, drawn in numpy so that they do not depend on the version of a drawing library.

In:  the content of the image, and random float64 in [0, 1) for all variation.
Out: uint8 [32, 32, 3].
Shapes are signed distance functions, drawn with a soft edge of one pixel. Digits are 8 x 8 bitmaps, enlarged
bilinearly. Only elementwise IEEE arithmetic is used, so the pixels are the same on every machine.
"""

import numpy as np

SIZE = 32
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 210, 50),
    "purple": (150, 60, 190),
    "cyan": (60, 200, 210),
}
SHAPES = ("circle", "square", "triangle", "ring", "cross")
BACKGROUNDS = {"black": (15, 15, 15), "white": (242, 242, 242), "grey": (128, 128, 128), "brown": (105, 70, 40)}
PLACES = {  # of a digit: (down, right) position of its square, as fractions of the free space
    "top left": (0.0, 0.0),
    "top right": (0.0, 1.0),
    "bottom left": (1.0, 0.0),
    "bottom right": (1.0, 1.0),
}
SCENE_DRAWS, DIGIT_DRAWS = 15, 5

_CENTRES = np.arange(SIZE) + 0.5


def draw_scene(
    objects: tuple[tuple[str, str], tuple[str, str]], horizontal: bool, background: str, random: np.ndarray
) -> np.ndarray:
    """Draw two (colour, shape) objects, the first left of the second or above it. random: float64 [SCENE_DRAWS]."""
    u = random * 2 - 1  # [-1, 1)
    picture = np.ones((SIZE, SIZE, 3)) * BACKGROUNDS[background] + 6 * u[12:15]
    for i, (colour, shape) in enumerate(objects):
        jitter = u[6 * i : 6 * i + 6]
        along, across = SIZE * (0.25 + 0.5 * i) + 1.5 * jitter[0], SIZE / 2 + 4 * jitter[1]
        x, y = (along, across) if horizontal else (across, along)
        distance = _distance(shape, _CENTRES[None, :] - x, _CENTRES[:, None] - y, 6.3 + 0.8 * jitter[2])
        cover = np.clip(0.5 - distance, 0, 1)[:, :, None]  # [S, S, 1]
        picture = picture * (1 - cover) + cover * (COLOURS[colour] + 14 * jitter[3:6])
    return _quantise(picture)


def draw_digit(bitmap: np.ndarray, place: str, light_on_dark: bool, random: np.ndarray) -> np.ndarray:
    """Draw an 8 x 8 bitmap (0..16) at one of PLACES, light on dark or the reverse. random: float64 [DIGIT_DRAWS]."""
    side = 20 + int(3 * random[0])  # 20..22 pixels
    room = SIZE - side
    top, left = (  # a margin of at least one pixel: some strokes reach the bitmap's edge
        min(room - 1, max(1, round(room * fraction + 2 * (r - 0.5)))) for fraction, r in zip(PLACES[place], random[1:3])
    )
    ink = np.zeros((SIZE, SIZE))
    ink[top : top + side, left : left + side] = _enlarge(_enlarge(bitmap / 16.0, side).T, side).T
    dark, light = 25 * random[3], 255 - 25 * random[4]
    grey = dark + (light - dark) * (ink if light_on_dark else 1 - ink)
    return _quantise(np.repeat(grey[:, :, None], 3, axis=2))


def _distance(shape: str, dx: np.ndarray, dy: np.ndarray, r: float) -> np.ndarray:
    """Return the signed distance (pixels, negative inside) to a shape of radius r at the origin; y points down."""
    ax, ay = np.abs(dx), np.abs(dy)
    if shape == "circle":
        return np.sqrt(dx * dx + dy * dy) - r
    if shape == "square":
        return np.maximum(ax, ay) - 0.85 * r
    if shape == "ring":
        return np.abs(np.sqrt(dx * dx + dy * dy) - 0.75 * r) - 0.25 * r
    if shape == "triangle":  # with the apex up
        return np.maximum(dy - 0.8 * r, 0.876 * (ax - 0.55 * (dy + 1.1 * r)))
    arm = 0.33 * r
    return np.minimum(np.maximum(ax - arm, ay - r), np.maximum(ax - r, ay - arm))


def _enlarge(image: np.ndarray, size: int) -> np.ndarray:
    """Enlarge the rows bilinearly: [h, w] -> [size, w]."""
    at = np.clip((np.arange(size) + 0.5) * (len(image) / size) - 0.5, 0, len(image) - 1)
    low = np.minimum(at.astype(np.int64), len(image) - 2)
    weight = (at - low)[:, None]
    return image[low] * (1 - weight) + image[low + 1] * weight


def _quantise(picture: np.ndarray) -> np.ndarray:
    return np.clip(np.floor(picture + 0.5), 0, 255).astype(np.uint8)
