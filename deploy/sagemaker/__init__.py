"""SageMaker endpoints with models on Neuron instances: `python -m deploy.sagemaker`, see README.md."""
