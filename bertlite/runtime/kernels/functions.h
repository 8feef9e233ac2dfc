// Functions of vectors: exp, and the activations of the feed-forward network.
#pragma once

#include "vectors.h"

namespace bertlite {

// GCC 12 else makes a call of it, in which constants are read again for each vector.
#define BERTLITE_INLINE inline __attribute__((always_inline))

// c0 x^n + c1 x^(n-1) + ...
template <int count>
BERTLITE_INLINE Vector polynomial(Vector x, const float (&coefficients)[count]) {
    Vector sum = broadcast(coefficients[0]);
#pragma GCC unroll 8
    for (int i = 1; i < count; i++) sum = multiply_add(sum, x, broadcast(coefficients[i]));
    return sum;
}

// 2^x by a minimax polynomial of the fraction: to a relative error of 7.5e-5 if the result is then rounded to
// bfloat16, by up to 2e-3. Otherwise its error is float quantization.  Below -126 it may be 0; nan stays nan.
template <bool rounded>
inline Vector exp2(Vector x) {
    return exp2(x, [](Vector fraction) {
        if constexpr (rounded)
            return polynomial(fraction, {0.07802452f, 0.22606716f, 0.69583356f, 0.9999252f});
        else
            return polynomial(fraction, {0.00021702256f, 0.0012439687f, 0.0096788406f, 0.05548334f, 0.24022983f,
                                         0.693147f, 1.0f});
    });
}

constexpr float LOG2_E = 1.44269504f;

inline Vector sigmoid(Vector x) { return broadcast(1) / (broadcast(1) + exp2<false>(x * broadcast(-LOG2_E))); }

// x times the normal distribution function of x.  The distribution function is 1/2 + x P(x^2) / Q(x^2), fitted by
// least squares with Lawson's weights to a relative error of 2.1e-8 up to |x| = 5.6.  Beyond, it is exactly 0 or 1 in
// float32. Trained models have neurons of 30 and more at every token, and their errors would add up over the layers.
// If the result is then rounded to 8 bits, it is 1/2 + x P(x^2), off by 1.3e-4 / |x| at most. Beyond |x| = 4 it is
// exactly 0 or 1 again, as P(16) is 1/8.
template <bool rounded>
BERTLITE_INLINE Vector gelu(Vector x) {
    if constexpr (rounded) {
        const Vector bounded = max(broadcast(-4.0f), min(broadcast(4.0f), x));
        const Vector p = polynomial(
            bounded * bounded, {-4.375824147473395e-10f, 5.050120677196901e-08f, -2.3093300569598796e-06f,
                                5.739017797168344e-05f, -0.0008827410638332367f, 0.009039524011313915f,
                                -0.06506366282701492f, 0.3981860876083374f});
        return x * multiply_add(bounded, p, broadcast(0.5f));
    }
    Vector bounded = max(broadcast(-5.6f), min(broadcast(5.6f), x));
    Vector z = bounded * bounded;
    Vector p = polynomial(z, {2.2297575341667653e-08f, 6.289786597335478e-06f, 0.00016892835265025496f,
                              0.0046773445792496204f, 0.033928919583559036f, 0.3989422619342804f});
    Vector q = polynomial(z, {1.1796624903581687e-06f, 7.33439956093207e-05f, 0.0018854865338653326f,
                              0.028677497059106827f, 0.25171351432800293f, 1.0f});
    const Vector beyond = x > zeros() ? broadcast(1) : zeros();  // a product, as of -infinity it is nan
    return x * (bounded == x ? multiply_add(bounded, p / q, broadcast(0.5f)) : beyond);
}

// the approximation of gelu by tanh (Hendrycks and Gimpel 2016): (1 + tanh(u)) / 2 = sigmoid(2u)
inline Vector gelu_tanh(Vector x) {
    Vector u = x * multiply_add(x * x, broadcast(0.044715f), broadcast(1.0f));
    return x * sigmoid(u * broadcast(1.5957691216057308f));  // 2 sqrt(2 / pi)
}

enum class Activation : Long { identity, relu, gelu, gelu_tanh, silu, quick_gelu, tanh, sigmoid };

// Call work with the function of vectors for an activation, so that it is chosen before a loop and not in it.
// `rounded`: the result is then rounded to 8 bits.
template <bool rounded = false, class Work>
BERTLITE_INLINE void with_activation(Activation activation, Work work) {
    switch (activation) {
        case Activation::identity: return work([](Vector x) { return x; });
        case Activation::relu: return work([](Vector x) { return max(zeros(), x); });
        case Activation::gelu: return work([](Vector x) { return gelu<rounded>(x); });
        case Activation::gelu_tanh: return work([](Vector x) { return gelu_tanh(x); });
        case Activation::silu: return work([](Vector x) { return x * sigmoid(x); });
        case Activation::quick_gelu: return work([](Vector x) { return x * sigmoid(x * broadcast(1.702f)); });
        case Activation::tanh:
            return work([](Vector x) {
                return multiply_add(sigmoid(x * broadcast(2.0f)), broadcast(2.0f), broadcast(-1.0f));
            });
        case Activation::sigmoid: return work([](Vector x) { return sigmoid(x); });
    }
}

}  // namespace bertlite
