"""Digits with TensorFlow's ParameterServerStrategy, tracked by the coordinator.

Start each task with its own TF_CONFIG, the coordinator (`chief`) last:

    TF_CONFIG='{"cluster": {"chief": ["localhost:4001"], "worker": ["localhost:4002"],
                            "ps": ["localhost:4003"]},
                "task": {"type": "chief", "index": 0}}' \
        python experiments/integrations/parameter_server_digits.py [epochs]

Workers and parameter servers serve until somebody ends them. Only the coordinator has the loop, so
it alone calls `rankzero.track`.
"""

import sys

import tensorflow as tf
from keras_digits import BATCH_SIZE, GOAL, convnet, digits

import rankzero


def serve(cluster: tf.distribute.cluster_resolver.TFConfigClusterResolver) -> None:
    server = tf.distribute.Server(
        cluster.cluster_spec(), cluster.task_type, cluster.task_id, protocol="grpc"
    )
    server.join()


def coordinate(
    cluster: tf.distribute.cluster_resolver.TFConfigClusterResolver, epochs: int
) -> None:
    strategy = tf.distribute.ParameterServerStrategy(cluster)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = convnet(16)
        # Its variables must be on the parameter servers.
        model.optimizer.build(model.trainable_variables)

    def on_replica(images, labels):
        with tf.GradientTape() as tape:
            loss = model.loss(labels, model(images, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def step(batches):
        return strategy.run(on_replica, next(batches))

    def batches_of_a_worker():
        return digits(BATCH_SIZE)[0].repeat()

    batches = iter(coordinator.create_per_worker_dataset(batches_of_a_worker))
    train, ((images, labels),) = digits(BATCH_SIZE)
    steps = len(train)
    config = {
        "epochs": epochs,
        "batch_size": BATCH_SIZE,
        "lr": round(float(model.optimizer.learning_rate), 6),
        **cluster.cluster_spec().as_dict(),
    }
    with rankzero.track("parameter-server-digits", config, goal=GOAL) as run:
        for epoch in range(epochs):
            # The workers take the steps as they can. `join` waits for all of them.
            losses = [coordinator.schedule(step, args=(batches,)) for _ in range(steps)]
            coordinator.join()
            for number, loss in enumerate(losses, epoch * steps + 1):
                run.log({"train/loss": loss.fetch()}, number)
            right = tf.argmax(model(images, training=False), -1) == labels
            run.evaluated({"val/accuracy": float(tf.reduce_mean(tf.cast(right, tf.float32)))})


def main(epochs: int) -> None:
    cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if cluster.task_type == "chief":
        coordinate(cluster, epochs)
    else:
        serve(cluster)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
