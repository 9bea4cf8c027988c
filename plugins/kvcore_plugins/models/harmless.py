"""Fields of a config that change neither what a layer keeps nor the parameters.

A field that is on no list is refused, so each is here for a reason.
"""

from __future__ import annotations


def named(*texts: str) -> frozenset[str]:
    """Return the words of some texts."""
    return frozenset(" ".join(texts).split())


HARMLESS = named(
    # Files and classes.
    "_attn_implementation _name_or_path _commit_hash architectures attn_implementation",
    "auto_map custom_pipelines model_type name_or_path tokenizer_class",
    "transformers_version use_cache torchscript use_bfloat16 fused_spec_config",
    "torch_dtype dtype quantization_config",
    # Activations, scales and caps.
    "activation_function attn_logit_softcapping attn_scale attn_temperature_tuning",
    "attention_multiplier clip_qkv embedding_multiplier final_logit_softcapping",
    "floor_scale hidden_act hidden_activation logit_scale logits_scaling",
    "normalization_type query_pre_attn_scalar residual_in_fp32 residual_multiplier",
    "scale_attn_weights scale_depth scale_emb",
    # Dropout.
    "attention_dropout attn_pdrop classifier_dropout embd_pdrop hidden_dropout",
    "resid_pdrop residual_dropout",
    # Initial values and norms.
    "initializer_cutoff_factor initializer_range rescale_prenorm_residual layer_norm_eps",
    "layer_norm_epsilon layernorm_epsilon norm_eps rms_norm_eps pretraining_tp",
    # Rotary positions.
    "cache_implementation global_rope_theta local_rope_theta mrope_section",
    "original_max_position_embeddings partial_rotary_factor rope_interleave",
    "rope_interleaved rope_local_base_freq rope_parameters rope_scaling rope_theta",
    "rotary_base rotary_dim rotary_emb_base rotary_pct use_mrope position_embedding_type",
    # Losses and scores of routers.
    "aux_loss_alpha moe_aux_loss_coeff moe_renormalize moe_router_activation_func",
    "moe_router_dtype n_group norm_topk_prob",
    "num_expert_group output_router_logits routed_scaling_factor router_aux_loss_coef",
    "router_jitter_noise router_z_loss_coef scoring_func seq_aux topk_group topk_method",
    "use_grouped_topk ep_size expert_model_parallel_size norm_topk",
    # Layers that predict further tokens.
    "mtp_hybrid_override_pattern mtp_layers_block_type mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings num_logits_to_keep num_nextn_predict_layers",
    # States and activations of single families.
    "activation_sparsity_pattern altup_active_idx altup_coef_clip altup_correct_scale",
    "mlp_hidden_act mamba_hidden_act mamba_chunk_size chunk_size swiglu_alpha",
    "swiglu_limit time_step_floor time_step_limit time_step_max time_step_min",
    "use_mamba_kernels output_gate_type",
    # Tokens and generation.
    "bad_words_ids begin_suppress_tokens bos_token_id decoder_start_token_id",
    "diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size eod_token_id",
    "eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id",
    "forced_eos_token_id id2label label2id length_penalty max_length min_length",
    "model_max_length no_repeat_ngram_size num_beam_groups num_beams num_labels",
    "num_return_sequences output_attentions output_hidden_states output_scores",
    "pad_token_id prefix problem_type pruned_heads remove_invalid_values",
    "repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens",
    "task_specific_params temperature tf_legacy_loss tie_encoder_decoder top_k top_p",
    "typical_p chunk_size_feed_forward image_token_id video_token_id",
    "vision_start_token_id vision_end_token_id vision_token_id",
    # Widths of dense layers, where a model has none.
    "intermediate_size intermediate_size_mlp",
    # GPT-2's summaries.
    "summary_activation summary_first_dropout summary_proj_to_labels summary_type",
    "summary_use_proj",
)
"""Names of such fields, in any family."""
