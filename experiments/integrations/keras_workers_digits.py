"""Digits with a Keras model on several TensorFlow workers, tracked.

Start each worker with its own TF_CONFIG:

    TF_CONFIG='{"cluster": {"worker": ["localhost:4001", "localhost:4002"]},
                "task": {"type": "worker", "index": 0}}' \
        python experiments/integrations/keras_workers_digits.py [epochs]

Keras 3's `fit` does not run under MultiWorkerMirroredStrategy (Keras issue 20585). So this example
has TensorFlow's own loop. It calls the callbacks as Keras' documentation describes for such a loop.
"""

import sys

import keras
import tensorflow as tf
from keras_digits import BATCH_SIZE, GOAL, convnet, digits

from rankzero.integrations.keras import RankZeroCallback


def main(epochs: int, *callbacks: keras.callbacks.Callback) -> None:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = convnet(16)
    train, val = digits(BATCH_SIZE)
    tracker = RankZeroCallback("keras-workers-digits", {"batch_size": BATCH_SIZE}, goal=GOAL)
    callback_list = keras.callbacks.CallbackList(
        [tracker, *callbacks], model=model, epochs=epochs, steps=len(train)
    )
    train = strategy.experimental_distribute_dataset(train)

    def on_replica(images, labels):
        with tf.GradientTape() as tape:
            loss = model.loss(labels, model(images, training=True)) / strategy.num_replicas_in_sync
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def step(images, labels):
        return strategy.reduce("SUM", strategy.run(on_replica, (images, labels)), axis=None)

    callback_list.on_train_begin()
    for epoch in range(epochs):
        callback_list.on_epoch_begin(epoch)
        for number, batch in enumerate(train):
            callback_list.on_train_batch_end(number, {"loss": step(*batch)})
        callback_list.on_epoch_end(epoch, {"val_accuracy": accuracy(model, val)})
    callback_list.on_train_end()


def accuracy(model, data) -> float:
    ((images, labels),) = data
    return float(
        tf.reduce_mean(tf.cast(tf.argmax(model(images, training=False), -1) == labels, tf.float32))
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
