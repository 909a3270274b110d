"""Names of flags and variables of other servers, as their sources have them.

Data only. Flags are written with underscores; a switch takes no value.
"""


def words(text):
    """The words of a text."""
    return text.split()


TGI_SWITCHES = words(
    """
    disable_custom_kernels disable_grammar_support enable_prefill_logprobs env json_output ngrok
    trust_remote_code
    """
)
TGI_FLAGS = words(
    """
    api_key cors_allow_origin cuda_graphs cuda_memory_fraction dtype graceful_termination_timeout hostname
    huggingface_hub_cache kv_cache_dtype lora_adapters master_addr master_port max_batch_prefill_tokens
    max_batch_size max_batch_total_tokens max_best_of max_client_batch_size max_concurrent_requests
    max_input_length max_input_tokens max_stop_sequences max_top_n_tokens max_total_tokens max_waiting_tokens
    model_id ngrok_authtoken ngrok_edge num_shard otlp_endpoint otlp_service_name payload_limit port
    prometheus_port quantize revision rope_factor rope_scaling shard_uds_path sharded speculate
    tokenizer_config_path usage_stats validation_workers waiting_served_ratio watermark_delta watermark_gamma
    weights_cache_override
    """
)
"""Source: text-generation-inference db931fc, launcher/src/main.rs. Each is a variable too, in capitals, but `env`."""

TGI_VARIABLES = words(
    """
    ATTENTION COMPUTE_TYPE CUSTOM_CACHE_REPO HF_API_TOKEN HF_AUTO_CAST_TYPE HF_BATCH_SIZE HF_HUB_ENABLE_HF_TRANSFER
    HF_HUB_USER_AGENT_ORIGIN HF_MODEL_ID HF_MODEL_QUANTIZE HF_MODEL_REVISION HF_MODEL_TRUST_REMOTE_CODE
    HF_NUM_CORES HF_SEQUENCE_LENGTH HF_TOKEN LOGURU_COLORIZE LOG_COLORIZE LOG_LEVEL PREFIX_CACHING SM_NUM_GPUS
    TGI_WIGGLE_ROOM
    """
)
"""Further variables. Source: the same, sagemaker-entrypoint.sh, Dockerfile.neuron and backends/neuron; optimum-neuron
bb1cc964, text-generation-inference/tgi_env.py."""

OPTIMUM_FLAGS = words(
    """
    batch_size data_parallel_size model port sequence_length served_model_name task tensor_parallel_size
    """
)
"""Source: optimum-neuron 213224e, commands/neuron/serve.py; its switch is `allow_non_cached_model`. Its image has
variables of the flags, with the prefix `SM_ON_`."""

VLLM_SWITCHES = words(
    """
    aggregate_engine_logging allow_credentials allow_deprecated_quantization async_scheduling
    calculate_kv_scales cudagraph_metrics data_parallel_external_lb data_parallel_hybrid_lb
    disable_cascade_attn disable_chunked_mm_input disable_custom_all_reduce disable_fastapi_docs
    disable_frontend_multiprocessing disable_hybrid_kv_cache_manager disable_log_requests disable_log_stats
    disable_nccl_for_dp_synchronization disable_sliding_window disable_uvicorn_access_log
    enable_auto_tool_choice enable_chunked_prefill enable_dbo enable_eplb enable_expert_parallel
    enable_flashinfer_autotune enable_force_include_usage enable_layerwise_nvtx_tracing enable_log_deltas
    enable_log_outputs enable_log_requests enable_logging_iteration_details enable_lora enable_mfu_metrics
    enable_mm_embeds enable_offline_docs enable_prefix_caching enable_prompt_embeds
    enable_prompt_tokens_details enable_request_id_headers enable_return_routed_experts
    enable_server_load_tracking enable_sleep_mode enable_ssl_refresh enable_tokenizer_info_endpoint
    enable_tower_connector_lora enforce_eager exclude_tools_when_tool_choice_none fully_sharded_loras headless
    interleave_mm_strings kv_cache_metrics kv_sharing_fast_prefill log_error_stack mm_encoder_only
    ray_workers_use_nsight return_tokens_as_token_ids skip_mm_profiling skip_tokenizer_init
    specialize_active_lora tokens_only trust_remote_code trust_request_chat_template use_tqdm_on_load
    """
)
VLLM_FLAGS = words(
    """
    additional_config all2all_backend allowed_headers allowed_local_media_path allowed_media_domains
    allowed_methods allowed_origins api_key api_server_count attention_backend attention_config block_size
    chat_template chat_template_content_format code_revision collect_detailed_traces compilation_config config
    config_format convert cp_kv_cache_interleave_size cpu_offload_gb cudagraph_capture_sizes
    data_parallel_address data_parallel_backend data_parallel_rank data_parallel_rpc_port data_parallel_size
    data_parallel_size_local data_parallel_start_rank dbo_decode_token_threshold dbo_prefill_token_threshold
    dcp_kv_cache_interleave_size decode_context_parallel_size default_chat_template_kwargs default_mm_loras
    disable_access_log_for_endpoints distributed_executor_backend download_dir dtype ec_transfer_config
    eplb_config expert_placement_strategy generation_config gpu_memory_utilization h11_max_header_count
    h11_max_incomplete_event_size hf_config_path hf_overrides hf_token host ignore_patterns
    io_processor_plugin kernel_config kv_cache_dtype kv_cache_memory_bytes kv_cache_metrics_sample
    kv_events_config kv_offloading_backend kv_offloading_size kv_transfer_config limit_mm_per_prompt
    load_format log_config_file logits_processor_pattern logits_processors logprobs_mode
    long_prefill_token_threshold lora_dtype lora_modules mamba_block_size mamba_cache_dtype mamba_cache_mode
    mamba_ssm_cache_dtype master_addr master_port max_cpu_loras max_cudagraph_capture_size max_log_len
    max_logprobs max_long_partial_prefills max_lora_rank max_loras max_model_len max_num_batched_tokens
    max_num_partial_prefills max_num_seqs max_parallel_loading_workers media_io_kwargs middleware
    mm_encoder_attn_backend mm_encoder_tp_mode mm_processor_cache_gb mm_processor_cache_type
    mm_processor_kwargs mm_shm_cache_max_object_size_mb model model_impl model_loader_extra_config nnodes
    node_rank num_gpu_blocks_override optimization_level otlp_traces_endpoint override_attention_dtype
    override_generation_config pipeline_parallel_size pooler_config port prefill_context_parallel_size
    prefix_caching_hash_algo profiler_config pt_load_map_location quantization reasoning_parser
    reasoning_parser_plugin response_role revision root_path runner safetensors_load_strategy scheduler_cls
    scheduling_policy seed served_model_name show_hidden_metrics_for_version speculative_config ssl_ca_certs
    ssl_cert_reqs ssl_certfile ssl_ciphers ssl_keyfile stream_interval structured_outputs_config swap_space
    tensor_parallel_size tokenizer tokenizer_mode tokenizer_revision tool_call_parser tool_parser_plugin
    tool_server ubatch_size uds uvicorn_log_level video_pruning_rate weight_transfer_config worker_cls
    worker_extension_cls
    """
)
"""Source: vLLM 0.16, engine/arg_utils.py and entrypoints/openai/cli_args.py. AWS's image has variables of the flags,
with the prefix `SM_VLLM_`."""

VLLM_DEFAULTS = dict(
    pair.split("=")
    for pair in words(
        """
        all2all_backend=allgather_reducescatter api_server_count=1 chat_template_content_format=auto
        config_format=auto convert=auto cp_kv_cache_interleave_size=1 cpu_offload_gb=0 data_parallel_backend=mp
        dbo_decode_token_threshold=32 dbo_prefill_token_threshold=512 dcp_kv_cache_interleave_size=1
        decode_context_parallel_size=1 expert_placement_strategy=linear h11_max_header_count=256
        h11_max_incomplete_event_size=4194304 hf_overrides={} kv_cache_dtype=auto kv_cache_metrics_sample=0.01
        kv_offloading_backend=native limit_mm_per_prompt={} load_format=auto logprobs_mode=raw_logprobs
        long_prefill_token_threshold=0 lora_dtype=auto mamba_cache_dtype=auto mamba_cache_mode=none
        mamba_ssm_cache_dtype=auto max_logprobs=20 max_long_partial_prefills=1 max_lora_rank=16 max_loras=1
        max_num_partial_prefills=1 media_io_kwargs={} mm_encoder_tp_mode=weights mm_processor_cache_gb=4
        mm_processor_cache_type=lru mm_shm_cache_max_object_size_mb=128 model_impl=auto
        model_loader_extra_config={} nnodes=1 node_rank=0 override_generation_config={}
        prefill_context_parallel_size=1 prefix_caching_hash_algo=sha256 pt_load_map_location=cpu
        response_role=assistant runner=auto safetensors_load_strategy=lazy scheduling_policy=fcfs seed=0
        ssl_cert_reqs=0 stream_interval=1 tokenizer_mode=auto ubatch_size=0 uvicorn_log_level=info worker_cls=auto
        """
    )
)
"""Defaults of flags that nothing here corresponds to. Source: vLLM 0.16, the same and config/."""

VLLM_VARIABLES = words(
    """
    CMAKE_BUILD_TYPE CUDA_HOME CUDA_VISIBLE_DEVICES K_SCALE_CONSTANT LD_LIBRARY_PATH LOCAL_RANK MAX_JOBS
    NO_COLOR NVCC_THREADS Q_SCALE_CONSTANT S3_ACCESS_KEY_ID S3_ENDPOINT_URL S3_SECRET_ACCESS_KEY VERBOSE
    VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE VLLM_ALLOW_INSECURE_SERIALIZATION
    VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_ALLREDUCE_USE_SYMM_MEM VLLM_API_KEY
    VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_AUDIO_FETCH_TIMEOUT
    VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER VLLM_CACHE_ROOT VLLM_CI_USE_S3 VLLM_COMPILE_CACHE_SAVE_FORMAT
    VLLM_COMPUTE_NANS_IN_LOGITS VLLM_CONFIGURE_LOGGING VLLM_CONFIG_ROOT VLLM_CPU_KVCACHE_SPACE
    VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_SGL_KERNEL VLLM_CUDART_SO_PATH
    VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_DBO_COMM_SMS VLLM_DEBUG_DUMP_PATH VLLM_DEBUG_LOG_API_SERVER_RESPONSE
    VLLM_DEBUG_MFU_METRICS VLLM_DEBUG_WORKSPACE VLLM_DEEPEPLL_NVFP4_DISPATCH VLLM_DEEPEP_BUFFER_SIZE_MB
    VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL VLLM_DEEP_GEMM_WARMUP
    VLLM_DISABLED_KERNELS VLLM_DISABLE_COMPILE_CACHE VLLM_DISABLE_LOG_LOGO VLLM_DISABLE_PYNCCL
    VLLM_DISABLE_SHARED_EXPERTS_STREAM VLLM_DOCKER_BUILD_CONTEXT VLLM_DO_NOT_TRACK VLLM_DP_MASTER_IP
    VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE VLLM_ENABLE_CUDAGRAPH_GC
    VLLM_ENABLE_FUSED_MOE_ACTIVATION_CHUNKING VLLM_ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING
    VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE VLLM_ENABLE_MOE_DP_CHUNK VLLM_ENABLE_RESPONSES_API_STORE
    VLLM_ENABLE_V1_MULTIPROCESSING VLLM_ENGINE_ITERATION_TIMEOUT_S VLLM_ENGINE_READY_TIMEOUT_S
    VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_FLASHINFER_ALLREDUCE_FUSION_THRESHOLDS_MB
    VLLM_FLASHINFER_MOE_BACKEND VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE VLLM_FLOAT32_MATMUL_PRECISION
    VLLM_FORCE_AOT_LOAD VLLM_FUSED_MOE_CHUNK_SIZE VLLM_GC_DEBUG VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS
    VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS VLLM_HAS_FLASHINFER_CUBIN VLLM_HOST_IP VLLM_HTTP_TIMEOUT_KEEP_ALIVE
    VLLM_IMAGE_FETCH_TIMEOUT VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_KV_CACHE_LAYOUT
    VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES VLLM_LOGGING_COLOR VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_LEVEL
    VLLM_LOGGING_PREFIX VLLM_LOGGING_STREAM VLLM_LOG_BATCHSIZE_INTERVAL VLLM_LOG_MODEL_INSPECTION
    VLLM_LOG_STATS_INTERVAL VLLM_LOOPBACK_IP VLLM_LORA_DISABLE_PDL VLLM_LORA_RESOLVER_CACHE_DIR
    VLLM_LORA_RESOLVER_HF_REPO_LIST VLLM_MAIN_CUDA_VERSION VLLM_MARLIN_INPUT_DTYPE VLLM_MARLIN_USE_ATOMIC_ADD
    VLLM_MAX_AUDIO_CLIP_FILESIZE_MB VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE VLLM_MEDIA_CONNECTOR
    VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_MEDIA_URL_ALLOW_REDIRECTS VLLM_MLA_DISABLE VLLM_MM_HASHER_ALGORITHM
    VLLM_MODEL_REDIRECT_PATH VLLM_MOE_DP_CHUNK_SIZE VLLM_MOE_ROUTING_SIMULATION_STRATEGY
    VLLM_MOE_USE_DEEP_GEMM VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT VLLM_MOONCAKE_BOOTSTRAP_PORT
    VLLM_MORIIO_CONNECTOR_READ_MODE VLLM_MORIIO_NUM_WORKERS VLLM_MORIIO_POST_BATCH_SIZE
    VLLM_MORIIO_QP_PER_TRANSFER VLLM_MQ_MAX_CHUNK_BYTES_MB VLLM_MSGPACK_ZERO_COPY_THRESHOLD
    VLLM_MXFP4_USE_MARLIN VLLM_NCCL_INCLUDE_PATH VLLM_NCCL_SO_PATH VLLM_NIXL_ABORT_REQUEST_TIMEOUT
    VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_NO_USAGE_STATS VLLM_NVFP4_GEMM_BACKEND
    VLLM_NVTX_SCOPES_FOR_PROFILING VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_PATTERN_MATCH_DEBUG VLLM_PLUGINS
    VLLM_PORT VLLM_PP_LAYER_PARTITION VLLM_PROCESS_NAME_PREFIX VLLM_RANDOMIZE_DP_DUMMY_INPUTS
    VLLM_RAY_BUNDLE_INDICES VLLM_RAY_DP_PACK_STRATEGY VLLM_RAY_PER_WORKER_GPUS
    VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_ROCM_CUSTOM_PAGED_ATTN VLLM_ROCM_FP8_MFMA_PAGE_ATTN
    VLLM_ROCM_FP8_PADDING VLLM_ROCM_MOE_PADDING VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16
    VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB VLLM_ROCM_QUICK_REDUCE_QUANTIZATION
    VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE VLLM_ROCM_USE_AITER
    VLLM_ROCM_USE_AITER_FP4BMM VLLM_ROCM_USE_AITER_FP4_ASM_GEMM VLLM_ROCM_USE_AITER_FP8BMM
    VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS VLLM_ROCM_USE_AITER_LINEAR VLLM_ROCM_USE_AITER_MHA
    VLLM_ROCM_USE_AITER_MLA VLLM_ROCM_USE_AITER_MOE VLLM_ROCM_USE_AITER_PAGED_ATTN VLLM_ROCM_USE_AITER_RMSNORM
    VLLM_ROCM_USE_AITER_TRITON_GEMM VLLM_ROCM_USE_AITER_TRITON_ROPE VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION
    VLLM_ROCM_USE_SKINNY_GEMM VLLM_RPC_BASE_PATH VLLM_RPC_TIMEOUT VLLM_SERVER_DEV_MODE
    VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD VLLM_SKIP_P2P_CHECK VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX
    VLLM_SLEEP_WHEN_IDLE VLLM_TARGET_DEVICE VLLM_TEST_FORCE_FP8_MARLIN VLLM_TEST_FORCE_LOAD_FORMAT
    VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS VLLM_TPU_BUCKET_PADDING_GAP
    VLLM_TPU_MOST_MODEL_LEN VLLM_TPU_USING_PATHWAYS VLLM_TRACE_FUNCTION VLLM_TUNED_CONFIG_FOLDER
    VLLM_USAGE_SOURCE VLLM_USAGE_STATS_SERVER VLLM_USE_AOT_COMPILE VLLM_USE_BYTECODE_HOOK VLLM_USE_DEEP_GEMM
    VLLM_USE_DEEP_GEMM_E8M0 VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT
    VLLM_USE_FBGEMM VLLM_USE_FLASHINFER_MOE_FP16 VLLM_USE_FLASHINFER_MOE_FP4 VLLM_USE_FLASHINFER_MOE_FP8
    VLLM_USE_FLASHINFER_MOE_INT4 VLLM_USE_FLASHINFER_MOE_MXFP4_BF16 VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8
    VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS VLLM_USE_FLASHINFER_SAMPLER VLLM_USE_FUSED_MOE_GROUPED_TOPK
    VLLM_USE_MEGA_AOT_ARTIFACT VLLM_USE_MODELSCOPE VLLM_USE_NCCL_SYMM_MEM VLLM_USE_NVFP4_CT_EMULATIONS
    VLLM_USE_PRECOMPILED VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM
    VLLM_USE_RAY_WRAPPED_PP_COMM VLLM_USE_STANDALONE_COMPILE VLLM_USE_TRITON_AWQ VLLM_USE_V2_MODEL_RUNNER
    VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_V1_USE_OUTLINES_CACHE VLLM_VIDEO_FETCH_TIMEOUT
    VLLM_VIDEO_LOADER_BACKEND VLLM_WORKER_MULTIPROC_METHOD VLLM_XGRAMMAR_CACHE_MB VLLM_XLA_CACHE_PATH
    VLLM_XLA_CHECK_RECOMPILATION VLLM_XLA_USE_SPMD V_SCALE_CONSTANT
    """
)
"""Source: vLLM 0.16, envs.py."""

PLUGIN_VARIABLES = words(
    """
    DISABLE_NEURON_CUSTOM_SCHEDULER NEURON_COMPILED_ARTIFACTS NEURON_CONTEXT_LENGTH_BUCKETS
    NEURON_ON_DEVICE_SAMPLING_DISABLED NEURON_TOKEN_GEN_BUCKETS VLLM_NEURON_FRAMEWORK
    """
)
"""Source: vllm-neuron a5ef7c8; before it, the guide of NxD Inference for vLLM."""

LMI_VARIABLES = words(
    """
    CUDA_MEMORY_FRACTION DJL_CACHE_DIR DJL_CLUSTER_SIZE DJL_ENTRY_POINT DJL_LEADER_ADDR DJL_VENV_DIR
    DJL_WORKER_ADDR_FORMAT ENABLE_CUDA_GRAPHS HF_MODEL_ID HF_MODEL_QUANTIZE HF_MODEL_TRUST_REMOTE_CODE
    HF_REVISION HF_TASK HF_TOKEN MAX_BATCH_PREFILL_TOKENS MAX_BATCH_SIZE MAX_CONCURRENT_REQUESTS
    MAX_NETTY_BUFFER_SIZE MODEL_LOADING_TIMEOUT MODEL_SERVER_HOME OMP_NUM_THREADS PIPELINE_PARALLEL_DEGREE
    PREDICT_TIMEOUT PYTHON_EXECUTABLE SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT SAGEMAKER_MAX_PAYLOAD_IN_MB
    SAGEMAKER_MAX_REQUEST_SIZE SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS SAGEMAKER_MULTI_MODEL
    SAGEMAKER_NUM_MODEL_WORKERS SAGEMAKER_STARTUP_TIMEOUT SERVING_BATCH_SIZE SERVING_CHUNKED_READ_TIMEOUT
    SERVING_DOWNLOAD_DIR SERVING_FAIL_FAST SERVING_FEATURES SERVING_JOB_QUEUE_SIZE SERVING_LOAD_MODELS
    SERVING_MAX_REQUEST_SIZE SERVING_MAX_WORKERS SERVING_MIN_WORKERS SERVING_MODEL_STORE SERVING_PROMETHEUS
    SERVING_RETRY_THRESHOLD SM_NUM_GPUS TENSOR_PARALLEL_DEGREE
    """
)
"""Source: djl-serving d21927c, its Java code and dockerd-entrypoint-with-cuda-compat.sh. `OPTION_*` and `ARGS_*` are in
tests/config/java.py."""
