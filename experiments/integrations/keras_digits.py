"""Digits with Keras on two replicas, tracked.

python experiments/integrations/keras_digits.py [epochs]
"""

import sys

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

from rankzero import Goal
from rankzero.integrations.keras import RankZeroCallback

BATCH_SIZE, VALIDATION_SAMPLES = 64, 360
GOAL = Goal("val/accuracy", "max", target=0.9)


def digits(batch_size: int) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    images, labels = load_digits(return_X_y=True)
    data = tf.data.Dataset.from_tensor_slices(
        (images.reshape(-1, 8, 8, 1).astype("float32") / 16, labels)
    )
    data = data.shuffle(len(labels), seed=0, reshuffle_each_iteration=False)
    train = data.skip(VALIDATION_SAMPLES).shuffle(len(labels), seed=1)
    return train.batch(batch_size, drop_remainder=True), data.take(VALIDATION_SAMPLES).batch(
        VALIDATION_SAMPLES
    )


def convnet(width: int) -> keras.Model:
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(width, 3, padding="same", activation="relu"),
            layers.Conv2D(2 * width, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.2),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(3e-3), loss, metrics=["accuracy"])
    return model


def two_replicas() -> tf.distribute.Strategy:
    """Return a strategy for all GPUs, or for the CPU as two logical devices if there is no GPU."""
    if tf.config.list_physical_devices("GPU"):
        return tf.distribute.MirroredStrategy()
    (processor,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        processor, [tf.config.LogicalDeviceConfiguration()] * 2
    )
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def main(epochs: int, *callbacks: keras.callbacks.Callback) -> None:
    with two_replicas().scope():
        model = convnet(16)
    train, val = digits(BATCH_SIZE)
    tracker = RankZeroCallback("keras-digits", {"batch_size": BATCH_SIZE}, goal=GOAL)
    model.fit(train, validation_data=val, epochs=epochs, callbacks=[tracker, *callbacks], verbose=2)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
