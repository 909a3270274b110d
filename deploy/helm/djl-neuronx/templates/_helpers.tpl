{{- define "djl.selector" -}}
app.kubernetes.io/name: djl-neuronx
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: server
{{- end }}

{{- define "djl.labels" -}}
app.kubernetes.io/name: djl-neuronx
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* The device plugin's resource and its amount for a list of models. Cores of a copy: see docs/neuron.md. */}}
{{- define "djl.devices" -}}
{{- $instance := get (.root.Files.Get "instances.yaml" | fromYaml) .root.Values.instanceType }}
{{- $cores := 0 }}
{{- $shown := list }}
{{- range $name, $model := .models }}
  {{- $o := $model.options }}
  {{- $degree := mul (int $o.tensor_parallel_degree) (int (default 1 $o.pipeline_parallel_degree)) (int (default 1 $o.ep_degree)) }}
  {{- $degree = max $degree (int (default 1 $o.draft_model_tp_size)) }}
  {{- $copies := int (default 1 $o.replicas) }}
  {{- $cores = add $cores (mul $degree $copies) }}
  {{- $shown = append $shown (printf "%s: %d x %d" $name $degree $copies) }}
{{- end }}
{{- $all := mul (int $instance.devices) (int $instance.coresPerDevice) }}
{{- if gt $cores $all }}
  {{- fail (printf "the models take %d NeuronCores (degree x copies; %s), and %s has %d: lower options.replicas or options.tensor_parallel_degree, or set instanceType to a larger one" $cores (join ", " $shown) .root.Values.instanceType $all) }}
{{- end }}
{{- $devices := div (add $cores (sub (int $instance.coresPerDevice) 1)) (int $instance.coresPerDevice) }}
{{- $amount := ternary $devices $cores (eq .root.Values.resource "neuron") | int }}
{{- $whole := ternary (int $instance.devices) (int $all) (eq .root.Values.resource "neuron") | int }}
{{- $what := printf "the models take %d of the %d aws.amazon.com/%s of %s (%s)" $amount $whole .root.Values.resource .root.Values.instanceType (join ", " $shown) }}
{{- if and (lt $amount $whole) (hasPrefix "trn1" .root.Values.instanceType) (not (has (int $devices) (list 1 4 8))) }}
  {{- fail (printf "%s: on Trn1 the Neuron scheduler gives a pod 1, 4, 8 or all 16 devices; change options.replicas" $what) }}
{{- end }}
{{- if and (lt $amount $whole) (gt $amount 1) (not .root.Values.schedulerName) }}
  {{- fail (printf "%s: set schedulerName to the Neuron scheduler (my-scheduler), which gives a pod neighbouring ones, or options.replicas so that they take all" $what) }}
{{- end -}}
aws.amazon.com/{{ .root.Values.resource }}: {{ $amount }}
{{- end }}

{{- /* The properties file of a model. Values: text as it is, others as JSON; a backslash is an escape there. */}}
{{- define "djl.settings" -}}
{{- $options := dict "model_name" .name "core_wait_s" .root.Values.seconds.coreWait "model_id" .source }}
{{- if not .root.Values.seconds.compile }}
  {{- $_ := set $options "compilation" "forbid" }}
{{- end }}
{{- range $name, $value := merge (deepCopy .model.options) $options }}
option.{{ $name }}={{ ternary $value (toJson $value) (kindIs "string" $value) | replace "\\" "\\\\" }}
{{- end }}
{{- end }}

{{- /* The files of the models that are served. */}}
{{- define "djl.files" -}}
{{- range $name, $model := .Values.models }}
{{ $name }}.properties: |
  {{- include "djl.settings" (dict "root" $ "name" $name "model" $model "source" (default $model.model $model.compiled)) | trim | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Security of a pod and of its container: docker/README.md has the user, and /tmp as the only place for writing. */}}
{{- define "djl.podSecurity" -}}
automountServiceAccountToken: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  {{- with .Values.supplementalGroups }}
  supplementalGroups: {{- toYaml . | nindent 4 }}
  {{- end }}
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- /* Text of a variable or argument, where the kubelet replaces $(NAME) by a variable, and $$ by $. */}}
{{- define "djl.literal" -}}
{{ replace "$" "$$" . | quote }}
{{- end }}

{{- define "djl.container" -}}
image: "{{ .Values.image.repository }}:{{ .Values.image.tag }}{{ with .Values.image.digest }}@{{ . }}{{ end }}"
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
env:
  - {name: DJL_NEURONX_LOG_FORMAT, value: json}
  {{- range $name, $value := .Values.env }}
  - {name: {{ $name | quote }}, value: {{ include "djl.literal" $value }}}
  {{- end }}
  {{- with .Values.secrets.hubToken.name }}
  - name: HF_TOKEN
    valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: {{ $.Values.secrets.hubToken.key | quote }}}}
  {{- end }}
{{- end }}
