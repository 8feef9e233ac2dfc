// Functions of vectors: exp, and the activations of the feed-forward network.
#pragma once

#include "vectors.h"

namespace bertlite {

// e^x by its Taylor polynomial of degree 7 on |r| <= ln(2) / 2, x = n ln(2) + r; to float quantization.
// Below -87 it gives e^-87, which is 1.6e-38, and above 88 e^88; nan stays nan.
inline Vector exp(Vector x) {
    x = max(broadcast(-87.0f), min(broadcast(88.0f), x));
    Vector n = nearest_integer(x * broadcast(1.44269504f));  // 1 / ln(2)
    // ln(2) in two parts, of which the first has few bits, so that n times it is exact
    Vector r = multiply_add(n, broadcast(-0.693359375f), x);
    r = multiply_add(n, broadcast(2.12194440e-4f), r);
    Vector p = broadcast(1.0f / 5040);
    for (float coefficient : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        p = multiply_add(p, r, broadcast(coefficient));
    return ldexp(p, n);
}

inline Vector sigmoid(Vector x) { return broadcast(1) / (broadcast(1) + exp(zeros() - x)); }

// x times the normal distribution function of x.  The distribution function is 1/2 + x P(x^2) / Q(x^2), fitted by
// least squares with Lawson's weights to a relative error of 2.1e-8 up to |x| = 5.6.  Beyond, it is 0 or 1 in float32,
// exactly: trained models have neurons of 30 and more at every token, and their errors would add up over the layers.
inline Vector gelu(Vector x) {
    Vector bounded = max(broadcast(-5.6f), min(broadcast(5.6f), x));
    Vector z = bounded * bounded;
    Vector p = broadcast(2.2297575341667653e-08f), q = broadcast(1.1796624903581687e-06f);
    for (float coefficient : {6.289786597335478e-06f, 0.00016892835265025496f, 0.0046773445792496204f,
                              0.033928919583559036f, 0.3989422619342804f})
        p = multiply_add(p, z, broadcast(coefficient));
    for (float coefficient :
         {7.33439956093207e-05f, 0.0018854865338653326f, 0.028677497059106827f, 0.25171351432800293f, 1.0f})
        q = multiply_add(q, z, broadcast(coefficient));
    const Vector beyond = where_positive(x, broadcast(1), zeros());  // a product, as of -infinity it is nan
    return x * (bounded == x ? multiply_add(bounded, p / q, broadcast(0.5f)) : beyond);
}

// the approximation of gelu by tanh (Hendrycks and Gimpel 2016): (1 + tanh(u)) / 2 = sigmoid(2u)
inline Vector gelu_tanh(Vector x) {
    Vector u = x * multiply_add(x * x, broadcast(0.044715f), broadcast(1.0f));
    return x * sigmoid(u * broadcast(1.5957691216057308f));  // 2 sqrt(2 / pi)
}

enum class Activation : long { identity, relu, gelu, gelu_tanh, silu, quick_gelu, tanh, sigmoid };

inline Vector apply(Activation activation, Vector x) {
    switch (activation) {
        case Activation::identity: return x;
        case Activation::relu: return max(zeros(), x);
        case Activation::gelu: return gelu(x);
        case Activation::gelu_tanh: return gelu_tanh(x);
        case Activation::silu: return x * sigmoid(x);
        case Activation::quick_gelu: return x * sigmoid(x * broadcast(1.702f));
        case Activation::tanh: return multiply_add(sigmoid(x * broadcast(2.0f)), broadcast(2.0f), broadcast(-1.0f));
        case Activation::sigmoid: return sigmoid(x);
    }
    return x;
}

}  // namespace bertlite
