"""The operators of ATen that a file may name: those that compute tensors from tensors and numbers, and check what they are given.

An entry is a name, which stands for its functional overloads, or one overload ("lstm.data"). Only operators that were reviewed are listed, so that
operators that a later PyTorch adds are refused. Left out, besides operators that are not functions of tensors, are those that read or write where
unchecked arguments tell them to:

- `as_strided`, `set`, `resize`, `empty_strided`, `_reshape_alias`: raw strides and storage;
- `*_backward`, `segment_reduce`, `ctc_loss`, sparse, nested and quantized tensors, `_cudnn*`, `mkldnn*`: arguments that another operator produces;
- `*.data` of recurrent networks: sizes of batches that are data; `special_laguerre_polynomial_l`, `special_legendre_polynomial_p` and
  `binomial`: numbers that determine the running time;
- `batch_norm` and similar, `_weight_norm`, `lstm.input`, `slow_conv*`, `_scaled_dot_product_*` and `scaled_dot_product_attention`: sizes of one
  argument that must equal those of another (we have kernels for most);
- `embedding_bag` and similar, `fractional_max_pool*d`, `_grouped_mm`: offsets and samples that are positions;
- `upsample_*.default`: a scale in addition to a size (the overload `vec` takes only one of them), `repeat_interleave.Tensor`: a number of elements;
- `_stack`: a list that may be empty; `_native_multi_head_attention`, `_transformer_encoder_layer_fwd`: a number of heads that may be zero.

`graph.operator_arguments` has the arguments with which some listed operators would still kill the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "arithmetic": """
            add sub subtract rsub mul multiply div divide true_divide floor_divide remainder fmod pow float_power square sqrt rsqrt
            reciprocal neg negative positive abs absolute sign sgn addcmul addcdiv lerp hypot gcd lcm ldexp frexp maximum minimum fmax fmin
            clamp clamp_min clamp_max clip ceil floor round trunc fix frac nan_to_num copysign nextafter heaviside dist""",
        "functions": """
            exp exp2 expm1 log log2 log10 log1p logit logaddexp logaddexp2 xlogy sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh
            atanh arcsin arccos arctan arctan2 arcsinh arccosh arctanh sinc deg2rad rad2deg erf erfc erfinv lgamma digamma polygamma
            mvlgamma i0 igamma igammac special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
            special_digamma special_entr special_erf special_erfc special_erfcx special_erfinv special_exp2 special_expit special_expm1
            special_gammainc special_gammaincc special_gammaln special_i0 special_i0e special_i1 special_i1e special_log1p special_log_ndtr
            special_log_softmax special_logit special_logsumexp special_modified_bessel_i0 special_modified_bessel_i1
            special_modified_bessel_k0 special_modified_bessel_k1 special_multigammaln special_ndtr special_ndtri special_polygamma
            special_psi special_round special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_sinc special_softmax
            special_spherical_bessel_j0 special_xlog1py special_xlogy special_zeta special_chebyshev_polynomial_t
            special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w
            special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
            special_shifted_chebyshev_polynomial_w special_hermite_polynomial_h special_hermite_polynomial_he""",
        "comparison and logic": """
            eq ne lt le gt ge not_equal less less_equal greater greater_equal isclose isfinite isinf isnan isneginf isposinf isreal signbit
            isin logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift
            bitwise_right_shift __and__ __or__ __xor__ __lshift__ __rshift__ where masked_fill masked_select masked_scatter""",
        "complex numbers": """
            complex polar real imag angle conj conj_physical _conj _conj_copy _conj_physical _neg_view _neg_view_copy resolve_conj
            resolve_neg view_as_real view_as_complex view_as_real_copy view_as_complex_copy""",
        "activations": """
            relu relu6 prelu _prelu_kernel leaky_relu rrelu rrelu_with_noise_functional elu celu selu gelu silu mish glu hardtanh
            hardsigmoid hardswish hardshrink softshrink sigmoid log_sigmoid log_sigmoid_forward softplus threshold softmax _softmax
            _safe_softmax log_softmax _log_softmax""",
        "reductions": """
            sum nansum mean nanmean prod amax amin max min aminmax _aminmax argmax argmin all any std std_mean var var_mean norm
            linalg_vector_norm linalg_matrix_norm linalg_norm frobenius_norm nuclear_norm norm_except_dim linalg__powsum logsumexp
            count_nonzero median nanmedian mode quantile nanquantile trace cov corrcoef trapezoid trapz sum_to_size renorm""",
        "cumulative": "cumsum cumprod cummax cummin logcumsumexp _logcumsumexp cumulative_trapezoid diff gradient",
        "order": """
            sort argsort msort topk kthvalue unique_dim unique_dim_consecutive unique_consecutive _unique _unique2 nonzero nonzero_static
            nonzero_numpy argwhere bincount histc histogram histogramdd searchsorted bucketize""",
        "indices": """
            index _unsafe_index index_select index_add index_copy index_fill index_put _unsafe_index_put index_reduce gather scatter
            scatter_add scatter_reduce take take_along_dim put select slice narrow select_copy slice_copy narrow_copy select_scatter
            slice_scatter diagonal_scatter slice_inverse embedding one_hot""",
        "shape": """
            view view_as view_copy _unsafe_view reshape reshape_as _reshape_copy expand expand_as expand_copy broadcast_to broadcast_tensors
            squeeze unsqueeze squeeze_copy unsqueeze_copy flatten unflatten ravel permute permute_copy transpose transpose_copy swapaxes
            swapdims moveaxis movedim t t_copy numpy_T mT mH matrix_H adjoint diagonal diagonal_copy unfold unfold_copy alias alias_copy
            detach detach_copy contiguous clone lift lift_fresh lift_fresh_copy atleast_1d atleast_2d atleast_3d""",
        "parts": """
            cat concat concatenate stack hstack vstack dstack column_stack row_stack split split_copy split_with_sizes
            split_with_sizes_copy unsafe_split unsafe_split_with_sizes tensor_split hsplit vsplit dsplit chunk unsafe_chunk unbind
            unbind_copy repeat tile repeat_interleave.self_int roll rot90 flip fliplr flipud meshgrid cartesian_prod combinations block_diag
            diag diag_embed diagflat tril triu pad_sequence""",
        "padding and rearrangement": """
            pad constant_pad_nd _pad_circular _pad_enum reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d
            replication_pad2d replication_pad3d im2col col2im pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle""",
        "creation": """
            empty empty_like new_empty empty_permuted zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full fill zero
            copy eye arange range linspace logspace scalar_tensor tril_indices triu_indices vander linalg_vander bartlett_window
            blackman_window hamming_window hann_window kaiser_window""",
        "types": """
            to _to_copy type_as chalf fake_quantize_per_tensor_affine fake_quantize_per_channel_affine
            fake_quantize_per_tensor_affine_cachemask fake_quantize_per_channel_affine_cachemask""",
        "random numbers": """
            rand rand_like randn randn_like randint randint_like randperm bernoulli multinomial normal normal_functional poisson
            uniform random cauchy exponential geometric log_normal dropout native_dropout alpha_dropout feature_dropout
            feature_alpha_dropout""",
        "products": """
            matmul mm bmm mv dot vdot inner outer ger addmm addmv addr addbmm baddbmm linear bilinear _trilinear einsum tensordot kron
            chain_matmul linalg_matmul linalg_multi_dot linalg_vecdot linalg_cross cross _int_mm cdist _cdist_forward pdist _pdist_forward
            pairwise_distance cosine_similarity""",
        "linear algebra": """
            linalg_cholesky linalg_cholesky_ex linalg_cond linalg_det linalg_diagonal linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
            linalg_householder_product linalg_inv linalg_inv_ex linalg_ldl_factor linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq
            linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp linalg_matrix_power linalg_matrix_rank
            linalg_pinv linalg_qr linalg_slogdet linalg_solve linalg_solve_ex linalg_solve_triangular linalg_svd linalg_svdvals
            linalg_tensorinv linalg_tensorsolve _linalg_det _linalg_eigh _linalg_eigvals _linalg_slogdet _linalg_solve_ex _linalg_svd
            cholesky cholesky_inverse cholesky_solve det geqrf inverse logdet lu_solve lu_unpack matrix_exp matrix_power orgqr ormqr
            pinverse qr slogdet svd triangular_solve""",
        "Fourier transforms": """
            _fft_c2c _fft_c2r _fft_r2c fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn fft_rfft fft_rfft2 fft_rfftn fft_irfft
            fft_irfft2 fft_irfftn fft_hfft fft_hfft2 fft_hfftn fft_ihfft fft_ihfft2 fft_ihfftn fft_fftfreq fft_rfftfreq fft_fftshift
            fft_ifftshift stft istft""",
        "convolution": "convolution _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d",
        "pooling": """
            avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices
            max_pool3d_with_indices adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
            adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d max_unpool2d max_unpool3d""",
        "interpolation": """
            upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec upsample_linear1d.vec upsample_bilinear2d.vec
            upsample_trilinear3d.vec upsample_bicubic2d.vec _upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.vec grid_sampler
            grid_sampler_2d grid_sampler_3d affine_grid_generator""",
        "normalisation": "layer_norm native_layer_norm group_norm native_group_norm rms_norm",
        "attention and recurrence": """
            _scaled_dot_product_attention_math gru.input rnn_tanh.input rnn_relu.input lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell""",
        "losses": """
            binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy_loss hinge_embedding_loss huber_loss
            kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward nll_loss
            nll_loss_nd nll_loss2d nll_loss_forward nll_loss2d_forward poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss""",
    }
)
PERMITTED = frozenset(word for words in FAMILIES.values() for word in words.split())
