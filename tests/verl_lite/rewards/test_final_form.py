r"""Final forms in strict comparison: a table of references, right answers and wrong ones, decided by hand."""

# ruff: noqa: E501 (a row of the table is a line)

from __future__ import annotations

import pytest

from verl_lite.rewards import mathematics, rules

# reference | right answers | wrong answers
TABLE = r"""
56088 | 56088;56,088;56{,}088;56 088;x=56088;5.6088 \times 10^4;56088.0;**56088**;５６０８８;\text{56088} | 123x\cdot\frac{456}{x};\frac{123}{456^{-1}};e^{\ln 123+\ln 456};123(456);123*456;\frac{56088}{1};1 \cdot 56088;56087+1;56088+x-x;112176/2;\sqrt{56088^2};56088^1;\fbox{56088};8 \fbox{56088};56088e^0;-56088e^{i\pi};\log_{10} 10^{56088};123 \text{ x } 456;\begin{vmatrix}123&0\\0&456\end{vmatrix};56088, 56089;56088 or 56089;[56088,56088];56088 \bmod 60000;\lim_{x\to 1} 56088x;56088\sin^2 x+56088\cos^2 x;\max(56088, 1);\{56088,1\} \cap \{56088\};56088.0000001;56088\% 2
120 | 120;120\text{ ways};120^\circ;\$120;120 | {10 \choose 3};5!;\binom{10}{3};\frac{10!}{3!7!};(10)_{3};C(10,3);\operatorname{lcm}(8,15)
9.1\times10^{-31} | 9.1\times10^{-31};9.1e-31;9.10 \cdot 10^{-31} | 1.6\times10^{-19};9.2\times10^{-31};0
0.0000001 | 0.0000001;10^{-7};1e-7;\frac{1}{10000000} | -0.0000001;0;0.0000002
73 | **73**;`73`;73.;$73$;\(73\);７３;\textbf{73};73 apples;73。 | 37;73, 74;72.9999999
7\text{ cm} | 7;7\text{ cm};7 cm;7\text{ centimeters} | 7\text{ cm}, 8\text{ cm};7 \text{ or } 8;7\text{ m}
\frac{1}{3} | 1/3;0.333333;0.33333333;\frac{2}{6} | 0.33;0.3334;1-\frac23
\sqrt{2} | \sqrt2;1.414214;1.41421356;√2;\frac{2}{\sqrt{2}} | 1.41;2^{1/4}\cdot 2^{1/4}
\sqrt{2}\times10^{-19} | \sqrt{2}\times10^{-19} | \sqrt{3}\times10^{-19}
5\sqrt{3} | 5\sqrt3;\sqrt{75} | \sqrt{12}+\sqrt{27};2\sqrt3+3\sqrt3
7x | 7x;7 x;x \cdot 7 | 3x+4x;\frac{14x}{2};7x+y-y
x^2+1 | x^2+1;1+x^2;y=x^2+1 | (x+1)^2-2x;\frac{x^3+x}{x};x^2+2-1
10^{-20}x | 10^{-20}x | 2\cdot10^{-20}x
(1,2) | (1,2);（1，2）;(1, 2) | (2,1);(1,1+1);(1,2,3)
\{1,2\} | \{2,1\};1 or 2;x=1 \text{ or } x=2 | \{1,2,3\};1
[0,1) | [0,1) | (0,1);[0,1];[0,2)
(-\infty,2)\cup(2,\infty) | (-\infty,2)\cup(2,\infty);\mathbb{R}\setminus\{2\} | (-\infty,2)
3+4i | 3+4i;4i+3 | 3-4i;3+2i+2i
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}1\\2\end{pmatrix};\begin{bmatrix}1\\2\end{bmatrix} | \begin{pmatrix}2\\1\end{pmatrix};\begin{pmatrix}1\\1+1\end{pmatrix}
\frac{3\pi}{4} | \frac{3}{4}\pi;3\pi/4;0.75\pi | \pi-\frac{\pi}{4}
a^2+2ab | a^2+2ab | a^2+2
2\pi r | 2\pi r;2 r \pi | \pi r+\pi r
0.\overline{3} | 0.\overline{3} | 0.4
2^{100} | 2^{100};1267650600228229401496703205376 | 2^{99}\cdot2;2^{98}\cdot4;2^{101}-2^{100};\frac{2^{101}}{2};(2^{50})^2;2^{50}\cdot2^{50}
3\cdot2^{10} | 3\cdot2^{10};2^{10}\cdot3;3072 | 3\cdot2^9
10! | 10!;3628800 | 10\cdot9!;\frac{11!}{11};11!-10\cdot10!;6!\cdot7!
\ln 2 | \ln 2;\ln{2};0.693147 | \ln 4-\ln 2;\ln 3
\sin 20^\circ | \sin20^\circ;\sin(20^\circ) | 2\sin10^\circ\cos10^\circ;\sin20^\circ\cos0
\begin{pmatrix}3\\4\end{pmatrix} | \begin{pmatrix}3\\4\end{pmatrix} | \begin{pmatrix}1\\2\end{pmatrix}+\begin{pmatrix}2\\2\end{pmatrix};\begin{pmatrix}5\\5\end{pmatrix}-\begin{pmatrix}2\\1\end{pmatrix};\frac12\begin{pmatrix}6\\8\end{pmatrix}
(3,4) | (3,4);\langle3,4\rangle | \{3,4\};\{4,3\};(1,2)+(2,2);2(1.5,2)
11\sqrt{2} | 11\sqrt2;\sqrt{242} | 11\sqrt2+0;\sqrt2\cdot11+0
1000 | 10^3;1.0\times10^3;1000 | 10\cdot10^2;10\times10^{2}
12_8 | 12_8;12_{8};12 | 12_9;13_8
2 1/2 | 2 1/2;2\frac12;\frac52 | 21/2;\frac{21}{2}
12\text{ cm}^2 | 12;12\text{ cm}^2;12 cm^2;12\text{ square centimeters} | 12\text{ m}^2;12\text{ cm}^3;12\text{ cubic centimeters}
5\text{ m/s} | 5;5\text{ m/s};5 m/s;5\text{ meters per second} | 5\text{ km/h};5\text{ m};5\text{ mph}
7\text{ million} | 7;7\text{ million};7 million;7\text{ million dollars} | 7\text{ billion};7\text{ hundred};7\text{ dollars};7 thousand
7\text{ am} | 7;7\text{ a.m.};7 am | 7\text{ pm};7\text{ p.m.};7 pm
7\text{ euros} | 7;7\text{ euros};7\text{ EUR} | 7\text{ dollars};\$7
7\text{ kPa} | 7;7\text{ kPa};7 kPa;7\text{ kilopascals} | 7\text{ Pa};7\text{ MPa}
7\text{ radians} | 7;7\text{ rad} | 7\text{ degrees}
7\text{ square units} | 7;7\text{ units}^2;7\text{ sq cm} | 7\text{ cubic units};7\text{ units}^3
7\text{ units} | 7;7\text{ units};7\text{ cm};7 apples | 8\text{ units}
\$5 | 5;\$5;5\text{ dollars};USD 5 | 5\text{ cents}
\text{3 hours} | 3;3\text{ hours};3 hours;\text{3 hours} | 4;\text{4 hours};3\text{ minutes}
7\text{ cm}, 8\text{ cm} | 7,8;7\text{ cm and }8\text{ cm};8 cm and 7 cm | 7\text{ cm};7\text{ cm and }9\text{ cm}
A,C | A,C;\text{A and C};\text{A, C};C and A | A;\text{A, B, C};\text{A and B}
\text{June 20} | June 20;\text{June 20} | June 21;20
[-1,2) | [-1,2);-1\le x<2;2>x\ge-1 | -1<x<2;-1\le x\le2;-1\le x<1+1;-1\le x;0\le x+1<3
(-\infty,3] | x\le3;3\ge x;(-\infty,3] | x<3;x\ge3;2x\le6;y\le x
(-\infty,-1)\cup(3,\infty) | x<-1\text{ or }x>3;(3,\infty)\cup(-\infty,-1) | x<-1;x\le-1\text{ or }x\ge3;-1<x<3
-3<x<3 | 3>x>-3;(-3,3) | 3\ge x\ge-3;-3>x>3
0.1\overline{6} | \frac16;1/6;0.1\overline{6};0.1666667 | 0.17;\frac{1}{7};0.\overline{16}
30^\circ | 30\degree;30°;\angle ABC=30^\circ;m\angle A = 30 | 31\degree;\angle ABC=60^\circ-30^\circ
\emptyset | \varnothing;∅;\{\} | 0;\{0\}
\mathbb{R} | \mathbb R;(-\infty,\infty) | \mathbb{Q}
x^{3/2} | x^{1.5};x^{\frac32};x\sqrt{x} | x^{2.5};x^{0.5}
-7 | -7;−7 | -(-(-7));---7;7
7 | 7 | -(-7);--7
e^x | \exp(x);e^{x} | \exp(2x);\exp(x)+0
x | x;\text{}x | \sqrt[0]{x};\sqrt[00]{x};\frac{1}{\sqrt[0]{x}}
12345 | {\text{}x}=12,345;(\text{}x)=12,345 | {\text{}x}=12,346
(\text{A, B}), 12345 | (\text{A, B}), 12,345 | (\text{A, B}), 12,346
\text{(1, 2)}, 12345 | \text{(1, 2)}, 12,345 | \text{(1, 2)}, 12,346
\lim_{x\to 10} -0.5x | \lim_{x\to 10} -0.5x | [1,0.0];f(\lim_{x\to 0.0} 99)
[1,2) | [1,2) | [\frac{0}{0},2);(0/0,0/0)
2^{100} | 2^{100} | 0 2/①;2 1/②
\int_{-x}^{-1}\sqrt{abc}dx | \int_{-x}^{-1}\sqrt{abc}dx | 3
\begin{pmatrix}f(3)\\\text{1/0}\end{pmatrix}^{abc} | \begin{pmatrix}f(3)\\\text{1/0}\end{pmatrix}^{abc} | -3
5 | \underline{5};\color{red}{5};\textcolor{red}{5};\large 5;5^{\text{th}} | \underline{2+3};\color{red}{6};\exp(\ln 5)
"""
CASES = []
for line in TABLE.strip().splitlines():
    truth, right_answers, wrong_answers = line.split(" | ")
    CASES += [(truth, answer, 1.0) for answer in right_answers.split(";")]
    CASES += [(truth, answer, 0.0) for answer in wrong_answers.split(";")]


@pytest.mark.parametrize(("truth", "answer", "score"), CASES)
def test_only_a_final_form_of_the_right_value_is_right(truth: str, answer: str, score: float) -> None:
    assert rules.math_verify("math", f"So \\boxed{{{answer}}}.", truth)["score"] == score


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ("**73**", "73", 1.0),
        ("The answer is **73**.", "73", 1.0),
        ("The answer is 73, since 70+3=73.", "73", 1.0),
        ("The answer is 73 apples because I counted.", "73", 1.0),
        ("The final answer is $12$.", "12", 1.0),
        ("So $x=7$.", "7", 1.0),
        ("It is 7", "7", 1.0),
        ("答案是 73。", "73", 1.0),
        ("The answer is 7 or 8.", "7", 0.0),
        ("The answer is 7, 8, or 9", "7", 0.0),
        ("answer: 123*456", "56088", 0.0),
        ("I do not know", "4", 0.0),
    ],
)
def test_the_answer_in_a_text_without_a_box(text: str, truth: str, score: float) -> None:
    assert rules.math_verify("math", text, truth)["score"] == score


def test_closing_brackets_make_no_room_for_deeper_ones() -> None:
    assert mathematics._is_too_long(")" * 900 + "(" * 900)
    assert not mathematics._is_too_long("()" * 900)
